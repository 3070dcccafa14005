"""Make messages of text columns, so that a chat model is trained in the format it knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.row import BadRow

_ROLES = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
_ALLOWED = ("system", "user", "assistant")


@dataclass(frozen=True)
class TextMessages:
    """Convert the text of a field into messages.

    Args:
        markers: the text that begins a message of each role, where one text holds a conversation; None where each text
            is one message: a prompt the user's, an answer the assistant's.

    Raises:
        ValueError: a role that is not known, an empty marker, or no marker for user or assistant.
    """

    markers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.markers is None:
            return
        if unknown := sorted(set(self.markers) - set(_ALLOWED)):
            raise ValueError(f"as_messages has a marker for {unknown[0]!r}, expected one of {', '.join(_ALLOWED)}")
        for role in ("user", "assistant"):
            if not self.markers.get(role, "").strip():
                raise ValueError(f"as_messages needs the text that begins a message of the {role}")
        if not all(self.markers.values()) or len(set(self.markers.values())) < len(self.markers):
            raise ValueError(f"as_messages needs a different text for each role, got {dict(self.markers)}")

    def __call__(self, name: str, value: Any) -> Any:
        """Return the messages of a field's text, and any other value as it is.

        Args:
            name: our name of the field, such as ``prompt`` or ``chosen``.
            value: the value of the row.

        Raises:
            BadRow: an empty text, one without the markers, or a ``text`` column without markers.
        """
        if not isinstance(value, str) or name not in (*_ROLES, "text", "messages"):
            return value
        if not value.strip():
            raise BadRow(f"the {name} is empty")
        if self.markers is not None:
            return self._conversation(name, value)
        if name not in _ROLES:
            raise BadRow(
                f"as_messages: true makes one message of each text, and {name!r} may hold several: give the texts that "
                f'begin them, such as as_messages: {{user: "\\n\\nHuman:", assistant: "\\n\\nAssistant:"}}',
                f"{name!r} needs as_messages with markers",
            )
        return [{"role": _ROLES[name], "content": value}]

    def _conversation(self, name: str, text: str) -> list[dict[str, str]]:
        assert self.markers is not None
        roles = {marker: role for role, marker in self.markers.items()}
        longest_first = sorted(roles, key=len, reverse=True)
        before, *parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        if before.strip() or not parts:
            raise BadRow(
                f"the {name} begins with {text[:40]!r}, expected one of the texts of as_messages: {longest_first}",
                f"the {name} begins with none of the texts of as_messages",
            )
        pairs = zip(parts[::2], parts[1::2], strict=True)
        messages = [{"role": roles[marker], "content": content.strip()} for marker, content in pairs]
        return messages if messages[-1]["content"] or len(messages) == 1 else messages[:-1]
