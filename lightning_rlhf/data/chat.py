"""Chat messages: validation, rendering by a chat template, and the loss mask of the assistant's tokens."""

from __future__ import annotations

import inspect
import itertools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from lightning_rlhf.calls.references import as_function
from lightning_rlhf.data.columns import Fields, is_unicode
from lightning_rlhf.data.image_parts import as_bad_row, content_of, images_of
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.tool_methods import without_self
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError

Message = dict[str, Any]
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
# As in transformers: without these marks in the template, its mask of assistant tokens is all zeros.
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template is a program: a wrong template or row can raise any of these errors.
_TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
_RESERVED_OPTIONS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def messages_of(value: Any, label: str) -> list[Message]:
    """Return messages with ``role`` and ``content``; ShareGPT's ``from`` and ``value`` are converted.

    Content is text, or a list of parts if one of them is an image; parts that are all text become one text.

    Args:
        value: a list of messages, or a single message.
        label: name of the messages in error messages, such as ``prompt``.

    Raises:
        BadRow: the value is not a list of messages, or a speaker is not known.
    """
    messages = [value] if isinstance(value, Mapping) else value
    malformed = f"every message of a {label} needs 'role' and text or parts in 'content'"
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise BadRow(malformed)
    converted = [_convert_sharegpt(m) if "from" in m and "role" not in m else m for m in messages]
    # Formats with fixed keys, such as parquet, store missing keys of a message as null.
    converted = [{key: part for key, part in m.items() if part is not None} for m in converted]
    for message in converted:
        only_calls = isinstance(message.get("tool_calls"), list) and message["tool_calls"] and "content" not in message
        if only_calls:
            message["content"] = ""
        content = content_of(message.get("content"))
        if content is None or not isinstance(message.get("role"), str):
            raise BadRow(malformed)
        message["content"] = content
    return converted


def holds_messages(value: Any) -> bool:
    """Return whether a value is treated as messages: any list or mapping, even if malformed."""
    return isinstance(value, list | Mapping)


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the items, such as messages or characters, that two sequences share from the beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template with its tools and variables.

    Args:
        tokenizer: tokenizer with a chat template.
        tools: JSON schemas of the tools that the model can call.
        options: further variables of the template, such as ``enable_thinking``.
        expand: function of a text and its images that replaces each placeholder by the text that stands for its image;
            None where messages have no images.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    expand: Callable[[str, Sequence[EncodedImage]], str] | None = None

    def render(self, messages: Sequence[Message], label: str, generation: bool = False, expanded: bool = True) -> str:
        """Render messages as text.

        Args:
            messages: at least one message.
            label: name of the messages in error messages.
            generation: whether to add the generation prompt.
            expanded: whether the text contains what stands for each image, and not one placeholder.

        Raises:
            BadRow: the tokenizer has no template, the template rejects the messages, or the text is not valid UTF-8.
        """
        text = str(self._apply(messages, label, tokenize=False, add_generation_prompt=generation))
        if not is_unicode(text):
            raise BadRow(f"the {label} is not valid UTF-8 text")
        images = images_of(messages)
        if expanded and self.expand is not None:
            with as_bad_row():
                return self.expand(text, images)
        return text

    def end_of_turn(self) -> int | None:
        """Return the special token that the template renders after the text of an assistant's message.

        Returns:
            The token's id; None if the template renders none there, or rejects a question with an answer.
        """
        question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        ends = set()
        try:
            for messages in ([question, answer], [question, answer, question]):
                _, rendered, after = self.render(messages, "prompt").rpartition("answer")
                ends.add(next(iter(self._ids(after.lstrip())), None) if rendered else None)
        except BadRow:
            return None
        special = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        if len(ends) == 1 and ends <= special:
            return next(iter(ends))
        return None

    def tokenize_with_mask(
        self, messages: Sequence[Message], label: str, first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation up to the assistant's last message, with a mask of the assistant's tokens.

        ``{% generation %}`` marks in the template define the turns. Without them, the conversation is rendered up to
        each turn and before it; the difference is the turn. The mask ends with the end token of a turn.

        Args:
            messages: messages, at least one of them the assistant's.
            label: name of the messages in error messages.
            first: index of the first message that the mask may cover.

        Raises:
            BadRow: no assistant message, the template rejects the messages, or it renders a turn differently when more
                messages follow.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not turns:
            raise BadRow(f"the {label} has no assistant message to learn")
        text = self.render(messages, label)
        # The marks are positions in the text before images are expanded.
        if _GENERATION_MARK.search(self._template()) and not images_of(messages):
            encoding = self._apply(messages, label, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = list(encoding["input_ids"]), [bool(value) for value in encoding["assistant_masks"]]
            mask = self._without_text_behind_ends(ids, mask)
            if first:
                before = self.render(messages[:first], label)
                if not text.startswith(before):
                    raise _renders_differently(first - 1, label)
                start = len(self._ids(before))
                mask = [value and i >= start for i, value in enumerate(mask)]
        else:
            ids, mask = self._mask_by_prefixes(messages, label, turns, text)
        return self._end_after_answer(ids, mask, label)

    def _without_text_behind_ends(self, ids: list[int], mask: list[bool]) -> list[bool]:
        """Remove the tokens after a turn's end token from the mask, because a model never generates them."""
        result: list[bool] = []
        for marked, part in itertools.groupby(zip(mask, ids, strict=True), key=operator.itemgetter(0)):
            run = [token for _, token in part]
            ends = [i for i, token in enumerate(run) if token == self.tokenizer.eos_token_id]
            result += [marked and (not ends or i <= ends[-1]) for i in range(len(run))]
        return result

    def _mask_by_prefixes(
        self, messages: Sequence[Message], label: str, turns: list[int], text: str
    ) -> tuple[list[int], list[bool]]:
        spans = []
        for turn in turns:
            if turn:
                before = self.render(messages[:turn], label, generation=True)
            else:
                before = self._text_before_first_answer(messages[0], label)
            after = self.render(messages[: turn + 1], label)
            if not (text.startswith(after) and after.startswith(before)):
                raise _renders_differently(turn, label, "; use a template with {% generation %} marks")
            spans.append((len(before), len(after)))
        if not self.tokenizer.is_fast:
            raise UsageError("conversations need a fast tokenizer, or a chat template with {% generation %} marks")
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
        mask = [False] * len(ids)
        for begin, end in spans:
            inside = [i for i, (start, stop) in enumerate(offsets) if start < end and stop > begin]
            ends = [i for i in inside if ids[i] == self.tokenizer.eos_token_id]
            for i in inside:
                mask[i] = i <= (ends or inside)[-1]
            if inside and not ends and ids[inside[-1] + 1 :][:1] == [self.tokenizer.eos_token_id]:
                mask[inside[-1] + 1] = True  # the template does not end a last message
        return ids, mask

    def _text_before_first_answer(self, message: Message, label: str) -> str:
        """Return the text that the template renders before a conversation's first message, if it is the assistant's."""
        alone = self.render([message], label)
        with_prompt = self.render([message], label, generation=True)
        header = with_prompt.removeprefix(alone)
        if header in alone:
            return alone[: alone.index(header) + len(header)]
        return with_prompt

    def _end_after_answer(self, ids: list[int], mask: list[bool], label: str) -> tuple[list[int], list[bool]]:
        """Remove the tokens after the last answer, and append an end token if it is missing."""
        if not any(mask[1:]):
            raise BadRow(f"the chat template does not render the assistant's messages of the {label}")
        end = len(mask) - mask[::-1].index(True)
        begin = end - 1
        while begin and mask[begin - 1]:
            begin -= 1
        eos = self.tokenizer.eos_token_id
        ends = [i for i in range(begin, end) if ids[i] == eos]
        if ends:
            end = ends[-1] + 1
        elif ids[end : end + 1] == [eos]:
            end += 1
        else:
            return [*ids[:end], eos], [False, *mask[1:end], True]
        return ids[:end], [False, *mask[1:end]]

    def _apply(self, messages: Sequence[Message], label: str, **arguments: Any) -> Any:
        if self.tokenizer.chat_template is None:
            raise BadRow(
                f"the {label} is a list of messages, but the tokenizer has no chat template: use that of a chat model, "
                "add chat_template.jinja to its directory, or write the text itself"
            )
        try:
            if _reads_parts_only(self.tokenizer, self._template()):
                messages = list(map(_in_parts, messages))
            return self.tokenizer.apply_chat_template(list(messages), tools=self.tools, **arguments, **self.options)
        except _TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template rejects the {label}: {error}") from error

    def _template(self) -> str:
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=4)
def _reads_parts_only(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a template leaves out the text of a message whose content is not a list of parts.

    Those of LLaVA and SmolVLM do.

    Args:
        tokenizer: tokenizer with the template.
        template: chat template.
    """

    def renders(content: Any) -> bool:
        try:
            messages = [{"role": "user", "content": content}]
            return "question" in str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        except _TEMPLATE_ERRORS:  # it needs other messages
            return False

    return not renders("question") and renders([{"type": "text", "text": "question"}])


def _in_parts(message: Message) -> Message:
    """Return a message whose text is a part of its content."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _renders_differently(message: int, label: str, remedy: str = "") -> BadRow:
    return BadRow(
        f"the chat template renders message {message} of the {label} differently when more messages follow, so "
        f"the assistant's tokens cannot be located{remedy}",
        "the chat template renders messages differently when more messages follow",
    )


def chat_of(
    tokenizer: PreTrainedTokenizerBase,
    fields: Fields,
    options: Mapping[str, Any],
    default_tools: Sequence[Any] = (),
    expand: Callable[[str, Sequence[EncodedImage]], str] | None = None,
) -> Chat:
    """Return the chat template with a row's ``tools``; the row's ``chat_template_kwargs`` override the configuration's.

    Args:
        tokenizer: tokenizer with a chat template.
        fields: fields of the row.
        options: template variables of the configuration.
        default_tools: JSON schemas of the tools of rows without ``tools``.
        expand: argument of :class:`Chat`.

    Raises:
        BadRow: the row's tools or template variables are not valid.
    """
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise BadRow(f"tools is not valid JSON: {error.msg}", "tools is not valid JSON") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools must be a list of JSON schemas")
    row_options = fields.get("chat_template_kwargs")
    if row_options is not None and not isinstance(row_options, Mapping):
        raise BadRow(f"chat_template_kwargs is a {type(row_options).__name__}, expected a mapping of names to values")
    merged = {**options, **(row_options or {})}
    check_options(merged, BadRow)
    return Chat(tokenizer, tools or list(default_tools) or None, merged, expand)


def tool_schemas(functions: Sequence[str | Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schemas of functions.

    Args:
        functions: functions, or their references ``file.py:name`` or ``module:name``. Type hints and a docstring in
            Google style with an ``Args`` section describe the arguments. A class stands for its public methods; see
            :func:`~lightning_rlhf.data.tool_methods.tool_methods`.

    Raises:
        ValueError: a function has no docstring, or an argument has no type hint or no description.
    """
    schemas = []
    tools = [as_function(function) for function in functions]
    for loaded in [
        function for tool in tools for function in (without_self(tool) if isinstance(tool, type) else [tool])
    ]:
        try:
            schemas.append(get_json_schema(loaded))
        except (DocstringParsingException, TypeHintParsingException) as error:
            name = getattr(loaded, "__name__", repr(loaded))
            raise UsageError(f"the tool {name} has no schema for the chat template: {error}") from error
    return schemas


def check_options(options: Mapping[str, Any], kind: type[ValueError] = ValueError) -> None:
    """Validate that variables of a chat template do not override arguments of ``apply_chat_template``.

    Args:
        options: template variables.
        kind: class of the error to raise.

    Raises:
        ValueError: a variable has the name of an argument.
    """
    if reserved := sorted(_RESERVED_OPTIONS & options.keys()):
        raise kind(f"chat_template_kwargs must not contain {reserved[0]!r}, which is set automatically")


def _convert_sharegpt(message: Mapping[str, Any]) -> Message:
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise BadRow(
            f"a message is from {speaker!r}, expected one of {sorted(_ROLES)}", "a message is from an unknown speaker"
        )
    other_keys = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _ROLES[speaker], "content": message.get("value"), **other_keys}
