"""The UK AI Security Institute's ``inspect_ai``: its settings, and its logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.suites.suite import Figure, SuiteRun, TaskFigures

_SERVICE = "lightning"  # the key is in LIGHTNING_API_KEY, so that no other service's is sent
_WITHOUT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Inspection:
    """inspect-ai; see :class:`~lightning_rlhf.extras.suites.suite.Suite`.

    transformers loads the model in its process; vLLM is reached as a server.
    """

    module = "inspect_ai"
    package = "inspect-ai openai"
    key = "LIGHTNING_API_KEY"

    def check(self, run: SuiteRun) -> None:
        """Validate that inspect-ai has what the options ask for."""
        unknown = {"--include-path": run.include_path, "--fewshot": run.fewshot, "--tokenizer": run.tokenizer}
        for name, value in unknown.items():
            if value is not None:
                raise UsageError(
                    f"{name} is an option for lm-eval: inspect takes a task's file, --tasks folder/task.py@name, and "
                    f"its arguments as -- -T name=value"
                )
        if run.is_vllm:
            raise UsageError(
                f"inspect reaches vLLM as a server: run lightning-rlhf serve --model {run.model}, and set --server in "
                f"the place of --model"
            )
        if run.server is not None and not run.chat and run.max_tokens is None:
            raise UsageError("set --max-tokens: without a template, inspect asks a server for one token")

    def command(self, run: SuiteRun) -> list[str]:
        """See :class:`Suite`; ``eval-set`` continues with the rows that an earlier call left."""
        path = run.folder / "inspect-model.json"
        path.write_text(json.dumps({} if run.server is not None else _model(run), indent=2) + "\n")
        if run.server is None:
            model = f"hf/{Path(str(run.model)).resolve().name}"
        else:
            model = f"openai-api{'' if run.chat else '-completions'}/{_SERVICE}/{run.served_name}"
        options: dict[str, object] = {
            "--model": model,
            "--model-base-url": None if run.server is None else f"{run.server}/v1",
            "--model-config": path,
            "--log-dir": _logs(run),
            "--log-format": "json",
            "--display": "plain",
            "--retry-attempts": 0,
            "--limit": run.limit,
            "--max-tokens": run.max_tokens,
            "--temperature": run.temperature or None if run.server is None else run.temperature,
            "--max-connections": run.batch_size if run.server is None else run.concurrency,
        }
        words = [str(word) for pair in options.items() if pair[1] is not None for word in pair]
        return [self.module, "eval-set", *run.tasks, *words, *run.further]

    def results(self, run: SuiteRun) -> list[TaskFigures]:
        """See :class:`Suite`.

        Raises:
            RunError: a task has an error in each of its rows.
        """
        logs = [json.loads(path.read_text()) for path in sorted(_logs(run).glob("[0-9]*.json"))]
        if not logs or any(log["status"] != "success" for log in logs):
            return []
        return [figures(log) for log in logs]


def _logs(run: SuiteRun) -> Path:
    return run.folder / "logs"


def _model(run: SuiteRun) -> dict[str, Any]:
    """Return the arguments of its model of transformers.

    It renders the template to a text and lets the tokenizer add BOS to it a second time. Without a template it writes
    ``user: `` before the prompt, so that it gets one that writes the prompt alone.
    """
    arguments: dict[str, Any] = {"model_path": run.model, "trust_remote_code": False}
    if run.dtype is not None:
        arguments["dtype"] = run.dtype
    if run.temperature == 0:  # it samples with the temperature 0, which transformers rejects
        arguments["do_sample"] = False
    if run.chat:
        return {**arguments, "tokenizer_call_args": {"add_special_tokens": False}}
    return {**arguments, "chat_template": _WITHOUT_TEMPLATE}


def figures(log: Mapping[str, Any]) -> TaskFigures:
    """Return the figures in a log; the name of a scorer is left out if the task has only one.

    Args:
        log: contents of a log in JSON.

    Raises:
        RunError: the log has no score.
        UsageError: the log has another form.
    """
    try:
        task, results = log["eval"]["task"], log["results"] or {}
        epochs = log["eval"]["config"].get("epochs") or 1
        scores = results.get("scores") or []
        scored = max((score.get("scored_samples") or 0 for score in scores), default=0)
        if not scored:
            raise RunError(f"no row of {task} has a score: read its log with inspect view")
        found = []
        for score in scores:
            values = {name: metric["value"] for name, metric in score["metrics"].items()}
            prefix = f"{score['name']} " if len(scores) > 1 else ""
            stderr = values.pop("stderr", None)
            is_fraction = _are_fractions(log.get("samples") or [], score["name"])
            for name, value in values.items():
                is_mean = name in ("accuracy", "mean")
                found.append(Figure(prefix + name, float(value), stderr if is_mean else None, is_mean and is_fraction))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the log of inspect has another form than that of 0.3.285: no {error}") from error
    rows = max(1, scored // epochs)
    return TaskFigures(task, rows, scored, found, left_out=results["total_samples"] - scored)


def _are_fractions(samples: Sequence[Mapping[str, Any]], scorer: str) -> bool:
    """Return whether each value of a scorer is in [0, 1]: a letter, such as C for correct, is 0, 0.5 or 1."""
    values = [sample["scores"][scorer]["value"] for sample in samples if scorer in (sample.get("scores") or {})]
    return bool(values) and all(
        value in ("C", "P", "I", "N") or (isinstance(value, int | float) and 0 <= value <= 1) for value in values
    )
