"""What a parser of tool calls returns, and the base class of parsers; the extra ``environments`` has some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.environments.protocol import ToolCall


@dataclass(frozen=True)
class ParsedTurn:
    """Text and tool calls of a turn.

    Args:
        text: text without the calls.
        calls: tool calls, in order.
        malformed: description of the first call that could not be parsed; None if all could.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str | None = None


class ToolCallParser(ABC):
    """Base class of parsers. A parser finds the tool calls in the text of a turn."""

    @abstractmethod
    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        """Parse a complete turn.

        Args:
            text: text of the turn with special tokens, without its end token.
        """

    def check(  # noqa: B027 (most parsers accept every tokenizer)
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Validate the tokenizer before a model is loaded.

        Args:
            tools: JSON schemas of the environment's tools.

        Raises:
            ValueError: the parser cannot be used with it.
        """

    def example(self, call: ToolCall) -> str | None:
        """Return the text of a turn with one call, for ``check-data``, or None if the parser cannot write calls."""
        return None

    def close(self) -> None:  # noqa: B027 (most parsers have nothing to release)
        """Release resources. You can use the parser again."""
