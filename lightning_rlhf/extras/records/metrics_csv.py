"""MetricsCSV: writes the metrics of every step to a table that survives a crash."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlhf.callbacks.records.run_files import precedes, read_metrics
from lightning_rlhf.callbacks.records.run_history import VALIDATION_MARK, is_validation
from lightning_rlhf.callbacks.records.run_reader import RunWriter
from lightning_rlhf.ranges import check_at_least


class MetricsCSV(RunWriter):
    """Writes ``metrics.csv``: one row per training step and one per validation, the step in the first column.

    A row is written before the checkpoint of its step. When you resume, rows after the step of the checkpoint are
    removed, so the table continues without a gap.

    The row of a validation contains the metrics that begin with ``val/``, and all others that the validation logged.
    They are not repeated in training rows. If no metric begins with ``val/``, the column ``validation`` of the row is
    1.

    Args:
        every_n_steps: steps between two training rows, at least 1.
    """

    writes_metrics = True

    def __init__(self, every_n_steps: int = 1) -> None:
        check_at_least(1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._columns = ["step"]
        self._path: Path | None = None
        self._before: dict[str, Any] = {}  # metrics before a step or validation; those it logs are other objects
        self._of_validation: set[str] = set()  # metrics that a validation logged, and no step since

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the state of an earlier fit with the same callback."""
        if stage == "fit":
            self._path = None
            self._columns = ["step"]
            self._of_validation = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the names of metrics whose last values are those of a validation."""
        if self._of_validation:
            return {"of_validation": sorted(self._of_validation)}
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the names of metrics whose last values are those of a validation."""
        self._of_validation = set(state_dict["of_validation"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the table, or continue that of the resumed run."""
        self._table(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Store the metrics before the step."""
        self._before = dict(trainer.callback_metrics)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the row of a training step."""
        self._of_validation -= self._logged(trainer)
        if trainer.global_step % self.every_n_steps == 0:
            self._write(trainer, validation=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the metrics before the validation."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the row of a validation, except in the command ``validate``, which has no training step."""
        self._of_validation |= {name for name in self._logged(trainer) if not is_validation(name)}
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._write(trainer, validation=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add to the row of the last validation what callbacks such as PolicyCheck measured after it."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        path = self._table(trainer)
        rows = read_metrics(path)
        metrics = {name: repr(float(value)) for name, value in trainer.callback_metrics.items() if is_validation(name)}
        last = rows[-1] if rows else {}
        is_of_validation = last.get("step") == str(trainer.global_step) and any(last.get(name) for name in metrics)
        others = [last] if is_of_validation else rows
        new = sorted(name for name in metrics if not any(row.get(name) for row in others))
        if not new:
            return
        if not is_of_validation:
            last = {"step": str(trainer.global_step)}
            rows.append(last)
        last.update({name: metrics[name] for name in new})
        self._columns += [name for name in new if name not in self._columns]
        self._rewrite(path, rows)

    def _logged(self, trainer: Trainer) -> set[str]:
        """Return the names of the metrics that were logged since the start of the step or validation."""
        return {name for name, value in trainer.callback_metrics.items() if value is not self._before.get(name)}

    def _write(self, trainer: Trainer, validation: bool) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        path = self._table(trainer)
        metrics = trainer.callback_metrics  # computed at each access
        names = [name for name in metrics if (is_validation(name) or name in self._of_validation) == validation]
        row = {"step": str(trainer.global_step)}
        row |= {name: repr(float(metrics[name])) for name in names}
        if validation and not any(is_validation(name) for name in names):
            row[VALIDATION_MARK] = "1"
        added = sorted(name for name in row if name not in self._columns)
        if added:
            rows = read_metrics(path)
            self._columns += added
            self._rewrite(path, [*rows, row])
        else:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _table(self, trainer: Trainer) -> Path:
        """Return the path of the table, which the first call creates."""
        if self._path is None:
            self._path = Path(trainer.default_root_dir) / "metrics.csv"
            if trainer.is_global_zero and not trainer.fast_dev_run:
                rows = []
                if trainer.ckpt_path is not None:
                    rows = read_metrics(self._path)
                self._columns = list(rows[0]) if rows else ["step"]
                self._rewrite(self._path, [row for row in rows if precedes(row, trainer.global_step)])
        return self._path

    def _rewrite(self, path: Path, rows: list[dict[str, str]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".csv.new")
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(draft, path)
