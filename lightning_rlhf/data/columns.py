"""Which column of a row holds what: TRL's, verl's and conversations' names are known, others are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.row import BadRow, Row, TextRow

# A question about a row: the names under which the answer is looked for, as (our name, the data's name) pairs.
Question = tuple[tuple[str, str], ...]

PROMPT: Question = (("prompt", "prompt"), ("messages", "messages"), ("messages", "conversations"))
ANSWER: Question = (("completion", "completion"), ("messages", "messages"), ("messages", "conversations"))
ABOUT: tuple[Question, ...] = (
    tuple(
        ("ground_truth", name) for name in ("reward_model.ground_truth", "ground_truth", "answer", "solution", "label")
    ),
    (("data_source", "data_source"),),
    (("extra_info", "extra_info"),),
)
TEMPLATE: tuple[Question, ...] = ((("tools", "tools"),), (("chat_template_kwargs", "chat_template_kwargs"),))
_NOTHING = object()
# Names under which data sets often have what is asked for.
_OFTEN = {
    "prompt": ("question", "query", "instruction", "problem", "input"),
    "completion": ("response", "output", "answer", "solution"),
    "chosen": ("preferred", "accepted", "winner"),
    "rejected": ("dispreferred", "loser"),
}
_YES_NO = {"true": True, "1": True, "false": False, "0": False}


class AmbiguousColumns(ValueError):
    """Two columns could be meant, and only the user knows which."""


@dataclass(frozen=True)
class Fields:
    """A row under our names.

    Args:
        row: as it came.
        names: ours to the data's.
        read: of our name and the value in the row, the value to use, such as messages made of text; None takes the
            row's.
    """

    row: Row
    names: Mapping[str, str]
    read: Callable[[str, Any], Any] | None = None

    def __contains__(self, ours: str) -> bool:
        return ours in self.names

    def __getitem__(self, ours: str) -> Any:
        value = lookup(self.row, self.names.get(ours, ours))
        return value if self.read is None else self.read(ours, value)

    def get(self, ours: str) -> Any:
        """The value of a field, None where the row has none."""
        return self[ours] if ours in self.names else None

    def text(self, ours: str) -> str:
        """The text of a field.

        Raises:
            BadRow: missing, empty, or no text.
        """
        return text_of(self.row, self.names.get(ours, ours))

    def number(self, ours: str) -> float:
        """The finite number of a field.

        Raises:
            BadRow: missing, no number, infinite, or NaN.
        """
        value, column = self[ours], self.names.get(ours, ours)
        if isinstance(self.row, TextRow):
            try:
                value = float(value)
            except ValueError:
                raise BadRow(f"{column} holds {value!r}, expected a number", f"{column} is no number") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRow(f"{column} holds {_kind(value)}, expected a number")
        if not math.isfinite(value):
            raise BadRow(f"{column} is {value}, expected a finite number")
        return float(value)

    def flag(self, ours: str) -> bool:
        """The yes or no of a field: true, false, 1 or 0.

        Raises:
            BadRow: missing, or something else.
        """
        value, column = self[ours], self.names.get(ours, ours)
        if isinstance(self.row, TextRow):
            value = _YES_NO.get(str(value).strip().lower(), value)
        if value not in (0, 1) or isinstance(value, str):  # True and False are equal to them
            raise BadRow(f"{column} holds {value!r}, expected true or false", f"{column} is neither true nor false")
        return bool(value)

    def described(self) -> str:
        """Which column was taken for what, and whether it holds text or messages."""
        shown = []
        for ours, theirs in self.names.items():
            value = lookup(self.row, theirs)
            messages = isinstance(value, list) and value and isinstance(value[0], dict)
            kind = "messages" if messages else "text" if isinstance(value, str) else _kind(value)
            if kind == "text" and self[ours] is not value:
                kind = "text as messages"
            shown.append(f"{ours} <- {theirs} ({kind})")
        return ", ".join(shown)


class Columns:
    """Finds the columns that are asked for; those given explicitly win.

    Args:
        given: our name to the data's, dots leading into nested values.
        questions: what is asked of every row. A question without an answer is left open.

    Raises:
        ValueError: two columns are given in answer to one question.
    """

    def __init__(self, given: Mapping[str, str], questions: Sequence[Question]) -> None:
        self.given, self._questions = dict(given), questions
        for question in questions:
            both = sorted({ours for ours, _ in question} & given.keys())
            if len(both) > 1:
                raise ValueError(f"columns gives both {both[0]!r} and {both[1]!r}, of which only one can be used")

    def find(self, row: Row) -> Fields:
        """The row under our names.

        Raises:
            AmbiguousColumns: a question has two answers, and none is given explicitly.
        """
        names: dict[str, str] = {}
        claimed = set(self.given.values())
        for question in self._questions:
            ours = next((ours for ours, _ in question if ours in self.given), None)
            if ours is not None:
                names[ours] = self.given[ours]
                continue
            known_as = next(((ours, self.given[theirs]) for ours, theirs in question if theirs in self.given), None)
            if known_as is not None:  # {answer: result}: what answers are known to be, it is too
                names.update([known_as])
                continue
            filled, empty = list[tuple[str, str]](), list[tuple[str, str]]()
            for pair in question:
                value = _NOTHING if pair[1] in claimed else _found(row, pair[1])
                if value is not _NOTHING:
                    # Formats whose rows share one set of columns hold null where others hold something.
                    (empty if value is None else filled).append(pair)
            if len(filled) > 1:
                raise AmbiguousColumns(_which(question, filled))
            names.update((filled or empty)[:1])
        return Fields(row, names)

    def rest(self, fields: Fields, but: Sequence[str]) -> dict[str, Any]:
        """All columns that reward functions may ask for.

        Args:
            fields: of the row.
            but: our names of what they are not given, such as the prompt.

        Returns:
            The data's columns under their own names, or those given for them; and what answers :data:`ABOUT`.
        """
        about = {ours for question in ABOUT for ours, _ in question}
        renamed = {theirs: ours for ours, theirs in self.given.items() if ours not in about}
        hidden = {fields.names.get(ours, ours) for ours in but}
        row = {renamed.get(name, name): value for name, value in fields.row.items() if name not in hidden}
        nested = {ours: theirs for theirs, ours in renamed.items() if theirs not in fields.row and ours not in but}
        row |= {
            ours: lookup(fields.row, theirs)
            for ours, theirs in nested.items()
            if _found(fields.row, theirs) is not _NOTHING
        }
        return row | {ours: fields[ours] for ours in about if ours in fields}


def lookup(row: Row, column: str) -> Any:
    """The value of a column; dots lead into nested values unless a column has that very name.

    Raises:
        BadRow: there is none.
    """
    value = _found(row, column)
    if value is _NOTHING:
        raise BadRow(f"no column {column!r}, only {sorted(map(str, row))}{_hint(column, row)}", f"no column {column!r}")
    return value


def _hint(column: str, row: Row) -> str:
    """Return how to name a column that often holds what is missing; empty where there is none."""
    known = {name.lower(): name for name in row if isinstance(name, str)}
    meant = next((known[name] for name in (column, *_OFTEN.get(column, ())) if name in known), None)
    return f"; if {meant!r} is meant, give data.init_args.columns: {{{column}: {meant}}}" if meant else ""


def text_of(row: Row, column: str) -> str:
    """The text in a column.

    Raises:
        BadRow: the column is missing, empty, or no text.
    """
    value = lookup(row, column)
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} holds {_kind(value)}, expected text")
    if not value.strip():
        raise BadRow(f"column {column!r} is empty")
    if not is_unicode(value):
        raise BadRow(f"column {column!r} is not valid UTF-8 text")
    return value


def is_unicode(text: str) -> bool:
    """False for a text with lone surrogates (bytes that are no UTF-8, half a pair in JSON); no tokenizer reads it."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _found(row: Row, column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _NOTHING
        value = value[part]
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _which(question: Question, pairs: Sequence[tuple[str, str]]) -> str:
    (one, first), (other, second), asked = *pairs[:2], question[0][0]
    what = "answer" if asked == "completion" else asked
    return (
        f"both {first!r} and {second!r} could be the {what}; say which, under data.init_args: "
        f"'columns: {{{one}: {first}}}' or 'columns: {{{other}: {second}}}'"
    )
