"""A run of another package's tasks, and its figures in the form of ``evaluate``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lightning_rlhf.functional.samples import Z, wilson_interval


@dataclass(frozen=True)
class SuiteRun:
    """What a suite asks, of which model, and where its files go.

    Args:
        tasks: names of tasks, or their files.
        folder: folder of the suite's files.
        chat: whether prompts are rendered by the chat template.
        model: directory or hub id; None for a server.
        server: address with OpenAI's API, without ``/v1``; None for a model.
        served_name: name of the model on the server.
        tokenizer: directory of the tokenizer that counts the tokens of a server; None: texts are sent.
        adds_bos: whether the tokenizer begins a text with its BOS token.
        longest: tokens that the model reads; None if unknown.
        is_vllm: whether vLLM generates, and not transformers.
        dtype: dtype of the weights; None is that of the model's files.
        include_path: folder with more tasks.
        limit: number of rows of each task; None is all.
        fewshot: number of solved examples before a prompt; None is the task's.
        max_tokens: length of a response; None is the task's.
        temperature: temperature of sampling; None is the task's.
        batch_size: rows of one forward pass of transformers.
        concurrency: requests to a server at once.
        further: options of the suite's own command line.
    """

    tasks: Sequence[str]
    folder: Path
    chat: bool
    model: str | None = None
    server: str | None = None
    served_name: str = ""
    tokenizer: str | None = None
    adds_bos: bool = False
    longest: int | None = None
    is_vllm: bool = False
    dtype: str | None = None
    include_path: str | None = None
    limit: int | None = None
    fewshot: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    batch_size: int = 8
    concurrency: int = 50
    further: Sequence[str] = ()


class Figure(NamedTuple):
    """A figure of a task as the suite computed it.

    ``stderr`` is None if it computed none. ``is_fraction`` tells whether it is the mean of values in [0, 1].
    """

    name: str
    value: float
    stderr: float | None
    is_fraction: bool = False


class TaskFigures(NamedTuple):
    """The figures of a task, from ``responses`` to ``rows``; ``left_out`` further responses have no score."""

    task: str
    rows: int
    responses: int
    figures: Sequence[Figure]
    left_out: int = 0


class Suite(Protocol):
    """A package with tasks.

    Args:
        module: name of its module.
        package: what pip installs.
        key: name of the environment variable from which it reads the key of a server.
    """

    module: str
    package: str
    key: str

    def check(self, run: SuiteRun) -> None:
        """Raise UsageError for options that the suite does not have."""

    def command(self, run: SuiteRun) -> list[str]:
        """Write the suite's settings, and return its module and arguments."""

    def results(self, run: SuiteRun) -> list[TaskFigures]:
        """Read the figures; an empty list if the suite has not finished."""


def report(title: str, tasks: Sequence[TaskFigures], **settings: Any) -> dict[str, Any]:
    """Return the figures as ``evaluate`` prints and writes them.

    Args:
        title: model or server.
        tasks: figures of the tasks.
        **settings: further values, which are written.
    """
    sources = {
        each.task: {
            "prompts": each.rows,
            "responses": each.responses,
            "rewards": {
                figure.name: {**with_interval(figure, each.rows), "not_applicable": each.left_out}
                for figure in each.figures
            },
        }
        for each in tasks
    }
    return {"file": title, **settings, "sources": sources}


def with_interval(figure: Figure, rows: int) -> Mapping[str, Any]:
    """Return a figure with its 95 % interval.

    Fractions get Wilson's interval, as rewards in [0, 1] do (:func:`~lightning_rlhf.functional.samples.mean_interval`),
    with the number of trials that have the suite's standard error, n = p (1 - p) / stderr^2, at least the number of
    rows: of 0 or 1 the standard error is 0, which is no certainty. Other figures get mean -+ 1.96 stderr.

    Args:
        figure: figure of the suite.
        rows: number of rows, positive.
    """
    value, stderr = figure.value, figure.stderr
    result = {"mean": value, "stderr": stderr, "low": None, "high": None, "interval": "none"}
    if stderr is None or not math.isfinite(stderr):
        return {**result, "stderr": None}
    if figure.is_fraction and 0 <= value <= 1:
        trials = max(float(rows), value * (1 - value) / stderr**2 if stderr else 0.0)
        low, high = wilson_interval(value * trials, trials)
        return {**result, "low": low, "high": high, "interval": "wilson"}
    return {**result, "low": value - Z * stderr, "high": value + Z * stderr, "interval": "normal"}
