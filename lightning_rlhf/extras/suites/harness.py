"""EleutherAI's lm-evaluation-harness, ``lm_eval``: its settings, and its file of results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.suites.suite import Figure, SuiteRun, TaskFigures

_OLDEST = (0, 4, 10)  # 0.4.9 puts a second BOS before a chat template that begins with one; the others were not tried
# Metrics that are means of values in [0, 1]: acc, acc_norm, prompt_level_strict_acc, exact_match, pass@1, ...
_FRACTIONS = re.compile(r"(^|_)acc(uracy)?(_|$)|match|^pass(@|_at_)\d")
_RETRIES = 8
_SECONDS = 3600


class Harness:
    """lm-evaluation-harness; see :class:`~lightning_rlhf.extras.suites.suite.Suite`.

    transformers and vLLM load the model in its process. Of a server, it needs a tokenizer for log-likelihoods, and for
    a chat template that is rendered here; without one, the server renders its own.
    """

    module = "lm_eval"
    package = "'lm_eval[hf,api]'"
    key = "OPENAI_API_KEY"

    def check(self, run: SuiteRun) -> None:
        """Validate the version, and that responses are asked in a way that the cache and the tasks allow."""
        found = version("lm_eval")
        if tuple(map(int, re.findall(r"\d+", found)[:3])) < _OLDEST:
            raise UsageError(
                f"lm-eval {found} is too old, it puts two BOS tokens before a chat template: pip install "
                f"'lm_eval>={'.'.join(map(str, _OLDEST))}'"
            )

    def command(self, run: SuiteRun) -> list[str]:
        """See :class:`Suite`; the settings are in ``lm-eval.json``, which ``lm_eval run --config`` reads, too."""
        settings = {name: value for name, value in self._settings(run).items() if value is not None}
        path = run.folder / "lm-eval.json"
        path.write_text(json.dumps(settings, indent=2) + "\n")  # JSON is YAML
        return [self.module, "run", "--config", str(path), *run.further]

    def _settings(self, run: SuiteRun) -> dict[str, Any]:
        backend, arguments = _server(run) if run.server is not None else _model(run)
        generation: dict[str, Any] = {} if run.max_tokens is None else {"max_gen_toks": run.max_tokens}
        if run.temperature is not None:
            generation |= {"temperature": run.temperature, "do_sample": run.temperature > 0}
        return {
            "model": backend,
            "model_args": {name: value for name, value in arguments.items() if value is not None},
            "tasks": list(run.tasks),
            "include_path": run.include_path,
            "apply_chat_template": run.chat,
            "num_fewshot": run.fewshot,
            "limit": run.limit,
            "batch_size": 1 if run.server is not None else "auto" if run.is_vllm else run.batch_size,
            "gen_kwargs": generation or None,
            "log_samples": True,
            "output_path": str(_output(run)),
            "use_cache": str(run.folder / "cache"),
        }

    def results(self, run: SuiteRun) -> list[TaskFigures]:
        """See :class:`Suite`; the newest file counts."""
        files = sorted(_output(run).glob("*/results_*.json"), key=lambda path: path.name)
        return figures(json.loads(files[-1].read_text())) if files else []


def _output(run: SuiteRun) -> Path:
    return run.folder / "results"


def _model(run: SuiteRun) -> tuple[str, dict[str, Any]]:
    arguments = {"pretrained": run.model, "dtype": run.dtype, "trust_remote_code": False}
    if run.is_vllm:
        return "vllm", {**arguments, "gpu_memory_utilization": 0.9, "max_model_len": run.longest}
    return "hf", arguments


def _server(run: SuiteRun) -> tuple[str, dict[str, Any]]:
    route = "chat/completions" if run.chat and run.tokenizer is None else "completions"
    arguments = {
        "model": run.served_name,
        "base_url": f"{run.server}/v1/{route}",
        "num_concurrent": run.concurrency,
        "max_retries": _RETRIES,
        "timeout": _SECONDS,
        "tokenizer_backend": "None",
        "tokenized_requests": False,
    }
    if run.tokenizer is not None:
        # Its own default never adds BOS, but that of transformers does, so that a server had other scores.
        arguments |= {
            "tokenizer": run.tokenizer,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "add_bos_token": run.adds_bos and not run.chat,
        }
    if run.longest is not None:
        arguments["max_length"] = run.longest  # else it cuts prompts to 2048 tokens
    return "local-chat-completions" if route.startswith("chat") else "local-completions", arguments


def figures(results: Mapping[str, Any]) -> list[TaskFigures]:
    """Return the figures in a file of results; groups of tasks come after their tasks.

    Args:
        results: contents of ``results_*.json``.

    Raises:
        UsageError: the file has another form.
    """
    try:
        counts = results["n-samples"]
        found = []
        for task, values in {**results["results"], **results.get("groups", {})}.items():
            rows = int(values.get("sample_len") or counts[task]["effective"])
            names = [name for name in values if "," in name and not name.partition(",")[0].endswith("_stderr")]
            numbers = [name for name in names if isinstance(values[name], int | float)]
            found.append(TaskFigures(task, rows, rows, [_figure(values, name) for name in numbers]))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the results of lm-eval have another form than that of 0.4.13: no {error}") from error
    return [task for task in found if task.figures]


def _figure(values: Mapping[str, Any], name: str) -> Figure:
    """Return the metric ``acc,none`` as ``acc``, and ``exact_match,strict-match`` with the name of its filter."""
    metric, _, filtered = name.partition(",")
    stderr = values.get(f"{metric}_stderr,{filtered}")
    label = metric if filtered == "none" else f"{metric} ({filtered})"
    known = stderr if isinstance(stderr, int | float) else None  # "N/A" without one
    return Figure(label, float(values[name]), known, _FRACTIONS.search(metric) is not None)
