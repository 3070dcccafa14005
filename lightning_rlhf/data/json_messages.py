"""Messages that a file stores as text: their JSON is read, and Python's form of them is an error."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from lightning_rlhf.data.roles import is_known
from lightning_rlhf.data.row import BadRow

_FORMS = (("role", "content"), ("from", "value"))  # keys of a message with its speaker and its content
_CALLS = ("tool_calls", "function_call")  # keys of a message that needs no content


def parse_messages(value: Any, roles: Mapping[str, str] | None = None) -> Any:
    """Return the messages of a JSON text, as in CSV files and exports; any other value unchanged.

    JSON that is not a conversation stays a text, such as the answer ``{"from": "EUR", "to": "USD", "value": 3}``.

    Args:
        value: value of a column.
        roles: further names of roles, each with its role here.
    """
    if not (isinstance(value, str) and value.lstrip()[:1] in ("[", "{")):
        return value
    try:
        return _messages(json.loads(value), roles or {}) or value
    except (ValueError, RecursionError):
        return value


def check_not_python(value: Any, column: str, roles: Mapping[str, str]) -> None:
    """Check that a text is not messages as Python prints them, which pandas writes into CSV files.

    Args:
        value: value of the column.
        column: name of the column.
        roles: further names of roles, each with its role here.

    Raises:
        BadRow: the text is the Python form of messages; a model would learn it as text.
    """
    if not (isinstance(value, str) and value.lstrip().startswith(("[{'", "{'"))):
        return
    text = re.sub(r"\}\s+\{", "}, {", value.strip())  # NumPy prints no commas between the items of an array
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as \d in a text that is not Python
            messages = _messages(ast.literal_eval(text), roles)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return
    if messages:
        raise BadRow(
            f"column {column!r} has Python's form of a list of messages, {value.strip()[:40]!r}, instead of JSON: "
            f"convert the column by json.dumps before you write the file",
            f"column {column!r} has Python's form of a list of messages instead of JSON",
        )


def _messages(value: Any, roles: Mapping[str, str]) -> list[Any] | None:
    """Return a list of messages, or a single message as a list; None if the value is other data."""
    messages = value if isinstance(value, list) else [value]
    keys = [_keys(message) for message in messages]
    if not keys or not all(keys):
        return None
    pairs = list(zip(messages, keys, strict=True))
    known = any(is_known(message[speaker], roles) for message, (speaker, _) in pairs)
    complete = all(content in _CALLS or isinstance(message[content], str | list) for message, (_, content) in pairs)
    # A list with an unknown role is a conversation whose role needs a name; a single object is more often an answer.
    is_conversation = known or complete if isinstance(value, list) else known and complete
    return messages if is_conversation else None


def _keys(message: Any) -> tuple[str, ...]:
    """Return the keys of a message's speaker and of its content or calls; empty if it is no message."""
    if not isinstance(message, Mapping):
        return ()
    pairs = [(speaker, key) for speaker, content in _FORMS if speaker in message for key in (content, *_CALLS)]
    present = [pair for pair in pairs if pair[1] in message]
    filled = [pair for pair in present if message[pair[1]] is not None]
    return next(iter(filled or present), ())
