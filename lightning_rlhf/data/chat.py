"""Chat messages: what they must look like, how a template renders them, and which tokens an assistant said."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.columns import Fields, is_unicode
from lightning_rlhf.data.row import BadRow

Message = dict[str, Any]
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
# What transformers looks for, too: without these marks its mask of assistant tokens is all zeros.
_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template is a program: whatever its operations raise is its own fault, as what jinja's sandbox refuses is.
_TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
_TAKEN = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def messages_of(value: Any, what: str) -> list[Message]:
    """Messages with ``role`` and ``content``; those with ``from`` and ``value`` are given the usual names.

    Args:
        value: a list of messages, or one.
        what: they are, for what is said of them: ``prompt``.

    Raises:
        BadRow: something else, or a speaker that is not known.
    """
    messages = [value] if isinstance(value, Mapping) else value
    wrong = f"every message of a {what} needs 'role' and text in 'content'"
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise BadRow(wrong)
    usual = [_from_value(m) if "from" in m and "role" not in m else m for m in messages]
    # Formats whose rows share one set of keys hold null where a message has nothing.
    usual = [{key: part for key, part in m.items() if part is not None} for m in usual]
    for message in usual:
        called = isinstance(message.get("tool_calls"), list) and message["tool_calls"] and "content" not in message
        if called:
            message["content"] = ""
        if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
            raise BadRow(wrong)
    return usual


def holds_messages(value: Any) -> bool:
    """Whether a value is meant as messages, right or wrong ones."""
    return isinstance(value, list | Mapping)


def common_prefix(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages two conversations share from the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, with what a row or the configuration gives it.

    Args:
        tokenizer: with the template.
        tools: that the model may call, as JSON schemas.
        options: further variables of the template, such as ``enable_thinking``.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], what: str, generation: bool = False) -> str:
        """Messages as text.

        Args:
            messages: at least one.
            what: they are, for what is said of them.
            generation: whether an answer is to follow.

        Raises:
            BadRow: no template, messages that it refuses, or text that is not valid.
        """
        text = str(self._apply(messages, what, tokenize=False, add_generation_prompt=generation))
        if not is_unicode(text):
            raise BadRow(f"the {what} is not valid UTF-8 text")
        return text

    def marked(self, messages: Sequence[Message], what: str, first: int = 0) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, which ends with the last thing an assistant said, and which ids it said.

        A template with ``{% generation %}`` marks says itself what an assistant says. Of another one, a turn is what
        the conversation up to it has beyond the conversation before it, up to the end token.

        Args:
            messages: at least one of an assistant.
            what: they are, for what is said of them.
            first: message from which on is marked.

        Raises:
            BadRow: no assistant, a template that refuses, or one that renders earlier turns differently later on.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not turns:
            raise BadRow(f"no message of the {what} is an assistant's: there is nothing to learn")
        whole = self.render(messages, what)
        if _MARKS_ASSISTANT.search(self._template()):
            found = self._apply(messages, what, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            ids, said = list(found["input_ids"]), [bool(value) for value in found["assistant_masks"]]
            if first:
                before = self.render(messages[:first], what)
                if not whole.startswith(before):
                    raise _renders_differently(first - 1, what)
                start = len(self._ids(before))
                said = [value and place >= start for place, value in enumerate(said)]
        else:
            ids, said = self._by_prefixes(messages, what, turns, whole)
        return self._ended(ids, said, what)

    def _by_prefixes(
        self, messages: Sequence[Message], what: str, turns: list[int], whole: str
    ) -> tuple[list[int], list[bool]]:
        spans = []
        for turn in turns:
            before = self.render(messages[:turn], what, generation=True) if turn else self._opening(messages[0], what)
            after = self.render(messages[: turn + 1], what)
            if not (whole.startswith(after) and after.startswith(before)):
                raise _renders_differently(turn, what, ": give one with {% generation %} marks")
            spans.append((len(before), len(after)))
        if not self.tokenizer.is_fast:
            raise ValueError("conversations need a fast tokenizer, or a chat template with {% generation %} marks")
        found = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = list(found["input_ids"]), found["offset_mapping"]
        said = [False] * len(ids)
        for begin, end in spans:
            inside = [i for i, (start, stop) in enumerate(places) if start < end and stop > begin]
            ends = [i for i in inside if ids[i] == self.tokenizer.eos_token_id]
            for i in inside:
                said[i] = i <= (ends or inside)[-1]
        return ids, said

    def _opening(self, message: Message, what: str) -> str:
        """What a template writes before the words of an assistant that nobody asked: up to its generation prompt."""
        alone, asked = self.render([message], what), self.render([message], what, generation=True)
        header = asked.removeprefix(alone)
        return alone[: alone.index(header) + len(header)] if header in alone else asked

    def _ended(self, ids: list[int], said: list[bool], what: str) -> tuple[list[int], list[bool]]:
        """Cut behind the last thing said, with an end token there."""
        if not any(said[1:]):
            raise BadRow(f"the chat template shows nothing of what the assistant said in the {what}")
        end = len(said) - said[::-1].index(True)
        begin = end - 1
        while begin and said[begin - 1]:
            begin -= 1
        eos = self.tokenizer.eos_token_id
        ends = [i for i in range(begin, end) if ids[i] == eos]
        if ends:
            end = ends[-1] + 1
        elif ids[end : end + 1] == [eos]:
            end += 1
        else:
            return [*ids[:end], eos], [False, *said[1:end], True]
        return ids[:end], [False, *said[1:end]]

    def _apply(self, messages: Sequence[Message], what: str, **how: Any) -> Any:
        if self.tokenizer.chat_template is None:
            raise BadRow(f"the {what} is a list of messages, and the tokenizer has no chat template")
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=self.tools, **how, **self.options)
        except _TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template refuses the {what}: {error}") from error

    def _template(self) -> str:
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _renders_differently(message: int, what: str, remedy: str = "") -> BadRow:
    return BadRow(
        f"the chat template renders message {message} of the {what} differently when others follow, so what the "
        f"assistant said cannot be told{remedy}",
        "the chat template renders messages differently when others follow",
    )


def chat_of(tokenizer: PreTrainedTokenizerBase, fields: Fields, options: Mapping[str, Any]) -> Chat:
    """The template with a row's ``tools`` and ``chat_template_kwargs``, which win over the configuration's.

    Raises:
        BadRow: tools or options that no template takes.
    """
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise BadRow(f"tools is no JSON: {error.msg}", "tools is no JSON") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools holds something else than a list of JSON schemas")
    own = fields.get("chat_template_kwargs")
    if own is not None and not isinstance(own, Mapping):
        raise BadRow(f"chat_template_kwargs holds {type(own).__name__}, expected names with values")
    merged = {**options, **(own or {})}
    check_options(merged, BadRow)
    return Chat(tokenizer, tools or None, merged)


def check_options(options: Mapping[str, Any], kind: type[ValueError] = ValueError) -> None:
    """Refuse variables for a chat template that would change how it is called.

    Raises:
        ValueError: or what ``kind`` says.
    """
    if taken := sorted(_TAKEN & options.keys()):
        raise kind(f"chat_template_kwargs may not set {taken[0]!r}, which is set for you")


def _from_value(message: Mapping[str, Any]) -> Message:
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise BadRow(f"a message is from {speaker!r}, expected one of {sorted(_SPEAKERS)}", "an unknown speaker")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _SPEAKERS[speaker], "content": message.get("value"), **rest}
