"""Mapping of columns to fields. Column names of TRL, verl and conversation data are known, others are configured."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.json_messages import check_not_python, parse_messages
from lightning_rlhf.data.row import BadRow, Row, TextRow
from lightning_rlhf.expected_errors import UsageError

# Alternative columns of one piece of information, as pairs (our field, the data's column).
FieldCandidates = tuple[tuple[str, str], ...]

PROMPT: FieldCandidates = (("prompt", "prompt"), ("messages", "messages"), ("messages", "conversations"))
ANSWER: FieldCandidates = (("completion", "completion"), ("messages", "messages"), ("messages", "conversations"))
REWARD_FIELDS: tuple[FieldCandidates, ...] = (
    tuple(
        ("ground_truth", name) for name in ("reward_model.ground_truth", "ground_truth", "answer", "solution", "label")
    ),
    (("data_source", "data_source"),),
    (("extra_info", "extra_info"),),
)
IMAGES: FieldCandidates = (("images", "images"), ("images", "image"))
TEMPLATE_FIELDS: tuple[FieldCandidates, ...] = (
    (("tools", "tools"), ("tools", "functions")),
    (("chat_template_kwargs", "chat_template_kwargs"),),
    (("system", "system"), ("system", "system_prompt")),
    (("history", "history"),),
    IMAGES,
)
_MESSAGE_FIELDS = ("prompt", "messages", "completion", "chosen", "rejected")  # of which JSON text can be messages
# Columns that change the text in other libraries: an error says so where nothing here reads them.
CHANGE_TEXT = ("system", "system_prompt", "history", "input", "instruction", "videos", "video", "audios", "audio")
_TEXT_AS_MESSAGES = "text as messages"
_MISSING = object()
# Column names that data sets often use for a field.
_COMMON_NAMES = {
    "prompt": ("question", "query", "instruction", "problem", "input", "messages", "conversations", "conversation"),
    "completion": ("response", "output", "answer", "solution"),
    "chosen": ("preferred", "accepted", "winner"),
    "rejected": ("dispreferred", "loser"),
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
SOURCE_COLUMNS = ("source", "data_source")  # names of a column with the source of a row: ours, then verl's
MAX_SOURCES = 32  # a column with more different values does not name sources


def source_of(columns: Mapping[str, Any]) -> str | None:
    """Return the source of a row of the data, if it has one."""
    return next((str(columns[name]) for name in SOURCE_COLUMNS if columns.get(name) is not None), None)


class AmbiguousColumns(UsageError):
    """Two columns could contain the same field, and the configuration does not choose one."""


@dataclass(frozen=True)
class Fields:
    """A row whose values are read by this package's field names.

    Args:
        row: row with the data's column names.
        names: column of each field.
        transform: function of field and value that returns the value to use, such as messages made from text; None
            uses the row's value.
        mapping: configured column of each field, for messages.
        roles: further names of roles in messages that are JSON text, each with its role here.
    """

    row: Row
    names: Mapping[str, str]
    transform: Callable[[str, Any], Any] | None = None
    mapping: Mapping[str, str] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __contains__(self, field: str) -> bool:
        return field in self.names

    def __getitem__(self, field: str) -> Any:
        value = self._value(field)
        return value if self.transform is None else self.transform(field, value)

    def _value(self, field: str) -> Any:
        """Return the value of a field: messages of JSON text, and Alpaca's instruction with its input."""
        column = self.names.get(field, field)
        value = lookup(self.row, column, self.mapping)
        if field in _MESSAGE_FIELDS:
            check_not_python(value, column, self.roles)
            value = parse_messages(value, self.roles)
        if field == "prompt" and "input" in self.names and isinstance(value, str):
            return f"{value}\n{self.row[self.names['input']]}"
        return value

    def get(self, field: str) -> Any:
        """Return the value of a field, or None if the row does not have it."""
        return self[field] if field in self.names else None

    def text(self, field: str) -> str:
        """Return the text of a field.

        Raises:
            BadRow: the value is missing, empty, or not text.
        """
        return checked_text(self._value(field), self.names.get(field, field))

    def number(self, field: str) -> float:
        """Return the finite number of a field.

        Raises:
            BadRow: the value is missing, not a number, infinite, or NaN.
        """
        value, column = self[field], self.names.get(field, field)
        if isinstance(self.row, TextRow):
            try:
                value = float(value)
            except ValueError:
                raise BadRow(f"{column} holds {value!r}, expected a number", f"{column} is not a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRow(f"{column} holds {_type_name(value)}, expected a number")
        if not math.isfinite(value):
            raise BadRow(f"{column} is {value}, expected a finite number")
        return float(value)

    def flag(self, field: str) -> bool:
        """Return the boolean of a field: true, false, 1 or 0.

        Raises:
            BadRow: the value is missing or not a boolean.
        """
        value, column = self[field], self.names.get(field, field)
        if isinstance(self.row, TextRow):
            value = _BOOLEANS.get(str(value).strip().lower(), value)
        if value not in (0, 1) or isinstance(value, str):  # True == 1, False == 0
            raise BadRow(f"{column} holds {value!r}, expected true or false", f"{column} is neither true nor false")
        return bool(value)

    def describe(self) -> str:
        """Describe the column of each field and the kind of its value, such as text or messages."""
        return ", ".join(f"{field} <- {column} ({self._kind(field)})" for field, column in self.names.items())

    def has_messages(self) -> bool:
        """Return whether a field has messages, also those that were made of a text."""
        return any("messages" in self._kind(field) for field in self.names)

    def _kind(self, field: str) -> str:
        """Return the kind of a field's value in a few words."""
        written = lookup(self.row, self.names[field])
        value = parse_messages(written, self.roles) if field in _MESSAGE_FIELDS else written
        if isinstance(value, dict) and field in _MESSAGE_FIELDS:
            return "messages"
        if field in _MESSAGE_FIELDS and isinstance(value, list) and value and isinstance(value[0], dict):
            return "messages" if value is written else "messages in JSON text"
        if not isinstance(value, str):
            return _type_name(value)
        return "text" if self.transform is None or self.transform(field, value) is value else _TEXT_AS_MESSAGES

    def leave_out(self, field: str) -> str:
        """Return the remedy of an error about a field whose column is not meant for it."""
        column = self.names[field]
        name = field if column == self.mapping.get(field) else column
        return f"to leave it out, set data.init_args.columns: {{{name}: null}}"

    @property
    def unread(self) -> list[str]:
        """Names of the columns with a value that no field reads; also beside values that ``columns`` names by a path.

        Other paths, such as ``reward_model.ground_truth``, are of known formats.
        """
        read = set(self.names.values())
        opened = {column.partition(".")[0] for column in read if column not in self.row}
        values = [(name, value) for name, value in self.row.items() if name not in read | opened]
        for parent in self._parents():
            nested = _find_value(self.row, parent)
            values += [(f"{parent}.{key}", nested[key]) for key in nested] if isinstance(nested, Mapping) else []
        hidden = {*read, *self._parents()}
        return [name for name, value in values if name not in hidden and not _is_empty(value)]

    def _parents(self) -> list[str]:
        """Return the columns, and the paths in them, that contain a configured value and are not read themselves."""
        read = set(self.names.values())
        paths = [column.split(".") for column in self.mapping.values() if column in read and column not in self.row]
        parents = dict.fromkeys(".".join(path[:length]) for path in paths for length in range(1, len(path)))
        return [parent for parent in parents if not any(f"{parent}.".startswith(f"{column}.") for column in read)]

    @property
    def lost(self) -> list[str]:
        """Names of the columns that no field reads, and that are part of the text in other libraries.

        A column that can be the prompt is one of them only if another such column is the prompt.
        """
        can_be_prompt = ("input", "instruction")
        is_part = self.names.get("prompt") in can_be_prompt
        return [name for name in self.unread if name in CHANGE_TEXT and (is_part or name not in can_be_prompt)]


class Columns:
    """Finds the columns of fields; the configured mapping has priority.

    Args:
        mapping: configured column of each field; dots in a column separate the keys of nested values. A field or
            column with None is left out.
        field_candidates: alternative columns of each piece of information; rows without any of them do not have the
            field.

    Raises:
        ValueError: the mapping has two fields for the same information.
    """

    def __init__(self, mapping: Mapping[str, str | None], field_candidates: Sequence[FieldCandidates]) -> None:
        self.mapping = {field: column for field, column in mapping.items() if column is not None}
        self.left_out = mapping.keys() - self.mapping.keys()
        self._field_candidates = [
            tuple(pair for pair in self._with_nested_tools(candidates) if not self.left_out.intersection(pair))
            for candidates in field_candidates
        ]
        for candidates in field_candidates:
            both = sorted({field for field, _ in candidates} & self.mapping.keys())
            if len(both) > 1:
                raise UsageError(f"columns sets both {both[0]!r} and {both[1]!r}; set only one of them")

    def _with_nested_tools(self, candidates: FieldCandidates) -> FieldCandidates:
        """Return candidates with tools beside messages that the mapping names by a path: OpenAI's ``input.tools``."""
        if ("tools", "tools") not in candidates:
            return candidates
        paths = [column for field, column in self.mapping.items() if field in _MESSAGE_FIELDS and "." in column]
        parents = sorted({path.rpartition(".")[0] for path in paths})
        return (*candidates, *(("tools", f"{parent}.tools") for parent in parents))

    def find(self, row: Row) -> Fields:
        """Find the column of each field in a row.

        Raises:
            AmbiguousColumns: two columns could contain the same information, and the mapping does not choose one.
        """
        names: dict[str, str] = {}
        mapped = set(self.mapping.values())
        for candidates in self._field_candidates:
            configured = next((field for field, _ in candidates if field in self.mapping), None)
            if configured is not None:
                names[configured] = self.mapping[configured]
                continue
            renamed = next(
                ((field, self.mapping[column]) for field, column in candidates if column in self.mapping), None
            )
            if renamed is not None:  # {answer: result}: the column result replaces the known column answer
                names.update([renamed])
                continue
            filled, empty = list[tuple[str, str]](), list[tuple[str, str]]()
            for pair in candidates:
                value = _MISSING if pair[1] in mapped else _find_value(row, pair[1])
                if value is not _MISSING and not _has_no_tools(pair, value):
                    # Formats with fixed columns, such as parquet, store missing values of a row as null.
                    (empty if value is None else filled).append(pair)
            if len(filled) > 1:
                raise AmbiguousColumns(_ambiguity_message(candidates, filled))
            names.update((filled or empty)[:1])
        has_input = isinstance(row.get("input"), str) and not _is_empty(row["input"])
        if names.get("prompt") == "instruction" and has_input and "input" not in {*mapped, *self.left_out}:
            names["input"] = "input"
        return Fields(row, names, mapping=self.mapping)

    def other_columns(self, fields: Fields, exclude: Sequence[str]) -> dict[str, Any]:
        """Return all columns that reward functions can receive.

        Args:
            fields: fields of the row.
            exclude: fields that are not passed to them, such as the prompt.

        Returns:
            The data's columns under their own or their mapped names, and the :data:`REWARD_FIELDS`.
        """
        reward_fields = {field for candidates in REWARD_FIELDS for field, _ in candidates}
        renamed = {column: field for field, column in self.mapping.items() if field not in reward_fields}
        hidden = {fields.names.get(field, field) for field in exclude}
        row = {renamed.get(name, name): value for name, value in fields.row.items() if name not in hidden}
        nested = {
            field: column for column, field in renamed.items() if column not in fields.row and field not in exclude
        }
        row |= {
            field: lookup(fields.row, column)
            for field, column in nested.items()
            if _find_value(fields.row, column) is not _MISSING
        }
        return row | {field: fields[field] for field in reward_fields if field in fields}


def lookup(row: Row, column: str, mapping: Mapping[str, str] | None = None) -> Any:
    """Return the value of a column; dots separate the keys of nested values, unless a column has exactly this name.

    Args:
        column: name of the column.
        mapping: configured column of each field, which a message repeats.

    Raises:
        BadRow: the row does not have the column.
    """
    value = _find_value(row, column)
    if value is _MISSING:
        hint = _hint(column, row, mapping or {})
        raise BadRow(f"no column {column!r}, only {sorted(map(str, row))}{hint}", f"no column {column!r}")
    return value


def unread_message(column: str) -> str:
    """Return the message about a column that is part of the text in other libraries, and that nothing reads."""
    return (
        f"the column {column!r} is part of the text in other libraries, and nothing reads it here; to leave it out, "
        f"set data.init_args.columns: {{{column}: null}}"
    )


def check_no_other_prompt(fields: Fields, texts: Sequence[str]) -> None:
    """Check that a row without a prompt has no column that could be one.

    Args:
        fields: fields of the row.
        texts: texts that contain the prompt, if the row has one; a column whose text they contain is not missed.

    Raises:
        BadRow: the row has such a column; the message has the option that makes it the prompt.
    """
    unread = fields.unread
    likely = [name for name in _COMMON_NAMES["prompt"] if name in unread]
    if any(not _is_within(fields.row[name], texts) for name in likely):
        lookup({name: value for name, value in fields.row.items() if name != "prompt"}, "prompt", fields.mapping)


def _is_within(value: Any, texts: Sequence[str]) -> bool:
    return isinstance(value, str) and all(value in text for text in texts)


def _hint(column: str, row: Row, mapping: Mapping[str, str]) -> str:
    """Return a suggestion for the column mapping, with its other entries; empty if the row has no likely column."""
    known = {name.lower(): name for name in row if isinstance(name, str)}
    likely = next((known[name] for name in (column, *_COMMON_NAMES.get(column, ())) if name in known), None)
    if likely is None:
        near = difflib.get_close_matches(column, map(str, row), n=1)
        return f"; did you mean {near[0]!r}?" if near else ""
    entries = ", ".join(f"{field}: {source}" for field, source in {**mapping, column: likely}.items())
    return f"; to use {likely!r}, set data.init_args.columns: {{{entries}}}"


def text_of(row: Row, column: str, mapping: Mapping[str, str] | None = None) -> str:
    """Return the text of a column.

    Args:
        column: name of the column.
        mapping: configured column of each field, which a message repeats.

    Raises:
        BadRow: the column is missing, empty, or not text.
    """
    return checked_text(lookup(row, column, mapping), column)


def checked_text(value: Any, column: str) -> str:
    """Return the text of a column, or raise :class:`BadRow` if it is empty or not text."""
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} holds {_type_name(value)}, expected text")
    if not value.strip():
        raise BadRow(f"column {column!r} is empty")
    if not is_unicode(value):
        raise BadRow(f"column {column!r} is not valid UTF-8 text")
    return value


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates (from invalid UTF-8 or JSON), which tokenizers reject."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, a blank text, or an empty collection."""
    return value is None or (
        isinstance(value, str | list | dict) and not (value.strip() if isinstance(value, str) else value)
    )


def _find_value(row: Row, column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _has_no_tools(pair: tuple[str, str], value: Any) -> bool:
    """Return whether a column that can have tools under another name than ``tools`` has other values, such as code."""
    if pair[0] != "tools" or pair[1] == "tools" or value is None:
        return False
    tools = _parsed(value)
    tools = [_parsed(tool) for tool in tools] if isinstance(tools, list) else []
    return not tools or not all(isinstance(tool, Mapping) and tool.keys() & {"name", "function"} for tool in tools)


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text; of other texts and values None or the value."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _ambiguity_message(candidates: FieldCandidates, pairs: Sequence[tuple[str, str]]) -> str:
    (field, column), (other_field, other_column) = pairs[:2]
    label = "answer" if candidates[0][0] == "completion" else candidates[0][0]
    return (
        f"both {column!r} and {other_column!r} could be the {label}; set one of the two under data.init_args: "
        f"'columns: {{{field}: {column}}}' or 'columns: {{{other_field}: {other_column}}}'"
    )
