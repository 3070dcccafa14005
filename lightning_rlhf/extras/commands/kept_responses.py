"""Rows for training from scored responses: the best of each prompt, all above a reward, or pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_rlhf.expected_errors import UsageError, counted
from lightning_rlhf.extras.commands.response_rows import ResponseRow
from lightning_rlhf.extras.commands.responses_file import write_errors

if TYPE_CHECKING:
    from lightning_rlhf.extras.commands.scores import ScoredResponses  # imports torch, which takes seconds

KEEP_HELP = "best, above REWARD, or pairs"


@dataclass(frozen=True)
class Keep:
    """Which responses become rows.

    Args:
        kind: ``best`` for the response with the largest reward of each prompt, ``above`` for all different responses
            with a reward above ``reward``, ``pairs`` for the best and the worst response of each prompt.
        reward: bound of ``above``.
    """

    kind: Literal["best", "above", "pairs"]
    reward: float = math.nan

    @classmethod
    def parse(cls, words: Sequence[str]) -> Keep:
        """Return the choice from the words of the command line.

        Raises:
            UsageError: the words are not one of the choices.
        """
        if list(words) in (["best"], ["pairs"]):
            return cls("best" if words[0] == "best" else "pairs")
        if len(words) == 2 and words[0] == "above":
            try:
                bound = float(words[1])
            except ValueError:
                bound = math.nan
            if not math.isnan(bound):
                return cls("above", bound)
        raise UsageError(f"--keep must be best, pairs, or above with a number, got {' '.join(words)!r}")

    def rows(self, row: ResponseRow, scored: ScoredResponses) -> Iterator[dict[str, Any]]:
        """Yield the rows from the responses to one prompt.

        Responses that the length limit cut are not kept, except as the worst of a pair, nor are those without a reward.

        Args:
            row: prompt with its responses.
            scored: rewards of the responses.
        """
        totals = total_rewards(scored)
        known = [number for number, total in enumerate(totals) if not math.isnan(total)]
        whole = [number for number in known if not (row.truncated and row.truncated[number])]
        if not whole:
            return
        best = max(whole, key=lambda number: totals[number])
        if self.kind == "best":
            yield _row(row, best)
        elif self.kind == "above":
            first = {row.responses[number]: number for number in reversed(whole) if totals[number] > self.reward}
            yield from (_row(row, number) for number in sorted(first.values()))
        else:
            worst = min(known, key=lambda number: totals[number])
            if totals[worst] < totals[best]:
                yield _pair(row, best, worst)


def total_rewards(scored: ScoredResponses) -> list[float]:
    """Return the sum of the rewards of each response; a reward that does not apply counts 0, NaN if none applies."""
    totals = []
    for values in zip(*scored.rewards.values(), strict=True):
        applicable = [value for value in values if not math.isnan(value)]
        totals.append(math.fsum(applicable) if applicable else math.nan)
    return totals


def _answer(row: ResponseRow, number: int) -> list[dict[str, Any]]:
    """Return the messages of a response."""
    if conversations := row.of_conversations.get("conversations"):
        messages: list[dict[str, Any]] = conversations[number]
        return messages
    return [{"role": "assistant", "content": row.responses[number]}]


def _row(row: ResponseRow, number: int) -> dict[str, Any]:
    """Return a row for supervised learning."""
    if row.messages:
        return {**row.columns, **row.image_column, "messages": [*row.messages, *_answer(row, number)]}
    return {**row.columns, **row.image_column, "prompt": row.prompt, "completion": row.responses[number]}


def _pair(row: ResponseRow, best: int, worst: int) -> dict[str, Any]:
    """Return a row for learning from preferences."""
    if row.messages:
        return {
            **row.columns,
            **row.image_column,
            "prompt": row.messages,
            "chosen": _answer(row, best),
            "rejected": _answer(row, worst),
        }
    return {
        **row.columns,
        **row.image_column,
        "prompt": row.prompt,
        "chosen": row.responses[best],
        "rejected": row.responses[worst],
    }


def write_kept(path: Path, keep: Keep, rows: Sequence[ResponseRow], scored: Sequence[ScoredResponses]) -> str:
    """Write the rows of a choice, and return a sentence about them.

    Args:
        path: file of JSON lines, which does not exist.
        keep: choice of the responses.
        rows: prompts with their responses.
        scored: rewards of the responses.

    Raises:
        UsageError: no response is kept, or the file cannot be written.
    """
    of_prompts = [list(keep.rows(row, each)) for row, each in zip(rows, scored, strict=True)]
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for each in of_prompts for row in each]
    if not lines:
        raise UsageError(f"{path} was not written: no response was kept. Generate more responses, or keep others")
    draft = path.with_name(f"{path.name}.new")
    with write_errors(path, "the table is above"):
        draft.write_text("".join(lines), encoding="utf-8")
        draft.replace(path)
    with_rows = sum(1 for each in of_prompts if each)
    return f"{path} has {counted(len(lines), 'row')} from {with_rows} of {counted(len(rows), 'prompt')}"


def check_target(path: Path | None, keep: Sequence[str] | None, files: int) -> Keep | None:
    """Return the choice of the command line, validated before anything is scored; None without one.

    Raises:
        UsageError: one of ``--keep`` and ``--to`` is missing, there are several files, or the target exists.
    """
    if keep is None and path is None:
        return None
    if keep is None or path is None:
        raise UsageError(f"--keep and --to belong together: --keep {KEEP_HELP}, --to FILE.jsonl")
    choice = Keep.parse(keep)
    if files > 1:
        raise UsageError("--keep reads one file of responses")
    if path.suffix != ".jsonl":
        raise UsageError(f"--to must end with .jsonl, got {str(path)!r}")
    if path.exists():
        raise UsageError(f"{path} exists already: choose another name")
    with write_errors(path, "choose another --to"):
        path.parent.mkdir(parents=True, exist_ok=True)
    return choice
