"""Conversion of text columns to messages, so that a chat model is trained in its own format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.row import BadRow
from lightning_rlhf.expected_errors import UsageError

_ROLE_OF_FIELD = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
_CONVERSATIONS = ("text", "messages")  # fields whose text can contain several messages
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class TextMessages:
    """Conversion of the text of a field to messages.

    Args:
        markers: text that begins a message of each role, for texts that contain a conversation; None converts each text
            to one message: a prompt to a user message, an answer to an assistant message.

    Raises:
        ValueError: an unknown role, an empty or repeated marker, or no marker for user or assistant.
    """

    markers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.markers is None:
            return
        if unknown := sorted(set(self.markers) - set(_ROLES)):
            raise UsageError(f"as_messages has a marker for {unknown[0]!r}, expected one of {', '.join(_ROLES)}")
        for role in ("user", "assistant"):
            if not self.markers.get(role, "").strip():
                raise UsageError(f"as_messages needs a marker for {role}: the text that begins its messages")
        if not all(self.markers.values()) or len(set(self.markers.values())) < len(self.markers):
            raise UsageError(f"as_messages needs a different marker for each role, got {dict(self.markers)}")

    def __call__(self, name: str, value: Any) -> Any:
        """Convert the text of a field to messages; return other values unchanged.

        Args:
            name: name of the field, such as ``prompt`` or ``chosen``.
            value: value of the row.

        Raises:
            BadRow: the text is empty, or does not begin with a marker; or there are no markers, and texts of its column
                may contain conversations.
        """
        if not isinstance(value, str) or name not in (*_ROLE_OF_FIELD, *_CONVERSATIONS):
            return value
        if not value.strip():
            raise BadRow(f"the {name} is empty")
        if self.markers is not None:
            return self._conversation(name, value)
        if name not in _ROLE_OF_FIELD:
            raise BadRow(
                f"as_messages: true makes one message of each text, but {name!r} can contain several: set the markers "
                f'that begin them, such as as_messages: {{user: "\\n\\nHuman:", assistant: "\\n\\nAssistant:"}}',
                f"{name!r} needs as_messages with markers",
            )
        return [{"role": _ROLE_OF_FIELD[name], "content": value}]

    def _conversation(self, name: str, text: str) -> list[dict[str, str]]:
        """Split a text at the markers, and leave out an empty message at its end."""
        assert self.markers is not None
        roles = {marker: role for role, marker in self.markers.items()}
        longest_first = sorted(roles, key=len, reverse=True)  # one marker may begin with another
        before, *parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        if before.strip() or not parts:
            raise BadRow(
                f"the {name} begins with {text[:40]!r}, expected one of the markers of as_messages: {longest_first}",
                f"the {name} does not begin with a marker of as_messages",
            )
        pairs = zip(parts[::2], parts[1::2], strict=True)
        messages = [{"role": roles[marker], "content": content.strip()} for marker, content in pairs]
        if not messages[-1]["content"]:
            messages.pop()  # "... Assistant:" at the end requests an answer
        if not messages:
            raise BadRow(f"the {name} is empty")
        return messages
