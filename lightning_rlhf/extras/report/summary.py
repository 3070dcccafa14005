"""Report: prints a summary at the end of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Trainer
from rich.console import Console as RichConsole
from rich.table import Table

from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.callbacks.records.run_files import read_metrics
from lightning_rlhf.callbacks.records.run_reader import RunReader
from lightning_rlhf.expected_errors import UsageError, for_terminal
from lightning_rlhf.extras.console.held_out import before_and_after, unchanged_kinds
from lightning_rlhf.extras.console.row_values import own_parts
from lightning_rlhf.extras.records.metrics_csv import MetricsCSV
from lightning_rlhf.modules.rlhf import RLHFModule

_LABELS = {
    "val/fraction_correct_greedy": "correct answers, greedy",
    "val/fraction_correct_sampled": "correct answers, sampled",
    "val/score_greedy": "reward model's score, greedy",
    "val/score_sampled": "reward model's score, sampled",
    "val/score_orders_correct_first": "score orders correct first",
    "val/response_tokens_mean": "tokens per response",
    "val/truncated_fraction": "cut at the length limit",
}
_TIMES = {
    "time/sync_s": "sync weights",
    "time/generate_s": "generate",
    "time/reward_s": "compute rewards",
    "time/check_s": "compare engine and actor",
    "time/evaluate_s": "evaluate the models",
    "time/update_s": "update",
}


class Report(RunReader):
    """Prints the first and the last validation, responses of both, and the time of each part of the steps.

    Use it to see at the end of a run what training changed. You also need MetricsCSV, because this callback reads
    ``metrics.csv``.

    Args:
        num_samples: prompts to print, those with changed responses first.
    """

    prints_comparison = True

    def __init__(self, num_samples: int = 4) -> None:
        self.num_samples = num_samples
        self._before: list[dict[str, Any]] = []
        self._started = time.perf_counter()

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate that the trainer has RolloutLoop and MetricsCSV."""
        for kind in (RolloutLoop, MetricsCSV):
            if not any(isinstance(callback, kind) for callback in trainer.callbacks):
                raise UsageError(f"Report needs {kind.__name__} among the trainer's callbacks")

    def on_validation_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Store the responses of the first validation."""
        if not self._before:
            # Columns of the data may have other values than JSON, which a checkpoint must not contain.
            self._before = json.loads(json.dumps(self._loop(trainer).validation_samples, default=str))

    def state_dict(self) -> dict[str, Any]:
        """Return the responses of the first validation."""
        return {"before": self._before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the responses of the first validation."""
        self._before = state_dict["before"]

    def on_fit_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Print the tables and write ``report.json``."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        screen = RichConsole(highlight=False, markup=False)
        rows = read_metrics(Path(trainer.default_root_dir) / "metrics.csv")
        for part in (
            self.progress(rows),
            unchanged_kinds(rows) or None,
            self.responses(self._loop(trainer).validation_samples),
            self.times(rows),
        ):
            if part is not None:
                screen.print(part)
        summary = {"seconds": time.perf_counter() - self._started, "before": self._before}
        (Path(trainer.default_root_dir) / "report.json").write_text(json.dumps(summary, indent=1) + "\n")

    def progress(self, rows: list[dict[str, str]]) -> Table | None:
        """Return a table of the first and last validation, with reward, KL and speed of training."""
        training = [row for row in rows if row.get("reward/mean")]
        validations = before_and_after(rows, _LABELS)
        if validations is None or not training:
            return None
        first, last, compared = validations
        table = Table(title="Held-out problems; changes with 95 % intervals", title_justify="left")
        for heading in ("", f"step {first}", f"step {last}", "change"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, *values, change in compared:
            if change:  # its interval takes the place of those of the two means
                values = [value.partition(" (")[0] for value in values]
            before, after = values
            table.add_row(_LABELS.get(name, name.removeprefix("val/")), before, after, change)
        table.add_section()
        # Dynamic sampling trains only on prompts with contrast, whose mean reward is biased.
        reward = "reward/mean"
        if training[0].get("reward/generated_mean") and training[-1].get("reward/generated_mean"):
            reward = "reward/generated_mean"
        for name, label in ((reward, "training reward"), ("kl/ref", "KL to the reference, nats")):
            if training[0].get(name) and training[-1].get(name):  # a part of a resumed run may not have it
                table.add_row(label, f"{float(training[0][name]):.3f}", f"{float(training[-1][name]):.3f}")
        for name, label in (("perf/tokens_per_s", "tokens"), ("rollout/tokens_per_s", "generated")):
            speeds = [float(row[name]) for row in training if row.get(name)]
            if speeds:
                table.add_row(f"{label} per second, median", "", f"{median(speeds):.0f}")
        return table

    def responses(self, after: list[dict[str, Any]]) -> Table | None:
        """Return a table of greedy responses to the same prompts in the first and the last validation."""
        before = {row["prompt"]: row for row in self._before}
        pairs = [(before[row["prompt"]], row) for row in after if row["prompt"] in before]
        if not pairs:
            return None
        pairs.sort(key=lambda pair: pair[0]["response"] == pair[1]["response"])
        table = Table(title="Greedy responses to held-out problems", title_justify="left")
        for heading in ("prompt", "before", "after"):
            table.add_column(heading, overflow="fold")
        has_answers = "ground_truth" in after[0]  # the data's column may have another name
        if has_answers:
            table.add_column("correct answer", overflow="fold")
        prompts = own_parts([last["prompt"] for _, last in pairs])
        for prompt, (first, last) in list(zip(prompts, pairs, strict=True))[: self.num_samples]:
            texts = [prompt, first["response"], last["response"]]
            texts += [last["ground_truth"]] if has_answers else []
            shown = (str(text).strip()[-300:].encode(errors="backslashreplace").decode() for text in texts)
            table.add_row(*map(for_terminal, shown))
        return table

    def times(self, rows: list[dict[str, str]]) -> Table | None:
        """Return a table of the seconds of all steps by part."""
        totals = {name: sum(float(row[name]) for row in rows if row.get(name)) for name in _TIMES}
        whole = sum(float(row["time/step_s"]) for row in rows if row.get("time/step_s"))
        if not whole:
            return None
        table = Table(title="Time of the steps", title_justify="left")
        for heading in ("", "seconds", "fraction"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, label in _TIMES.items():
            table.add_row(label, f"{totals[name]:.1f}", f"{totals[name] / whole:.0%}")
        rest = whole - sum(totals.values())
        table.add_row("other", f"{rest:.1f}", f"{rest / whole:.0%}")
        return table

    def _loop(self, trainer: Trainer) -> RolloutLoop:
        return next(callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop))
