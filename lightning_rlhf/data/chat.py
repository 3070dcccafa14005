"""A tokenizer's chat template: rendering of messages in the template's own dialect, and its tools and variables."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from lightning_rlhf.calls.references import as_function
from lightning_rlhf.data.columns import Fields, is_unicode
from lightning_rlhf.data.image_parts import as_bad_row, images_of
from lightning_rlhf.data.messages import THOUGHTS, Message
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.tool_methods import without_self
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError

# As in transformers: without these marks in the template, its mask of assistant tokens is all zeros.
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template is a program: a wrong template or row can raise any of these errors.
_TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
# Tags before thoughts, in the texts of models and of their templates.
OPENS_THOUGHTS = re.compile(r"<(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]|<\|channel>")
CLOSES_THOUGHTS = re.compile(r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|<channel\|>")
_EMPTY_THOUGHTS = re.compile(r"(?:<(think|thinking|thought|reasoning|seed:think)>\s*</\1>|\[THINK\]\s*\[/THINK\])\s*$")
_LONGEST_TAG = 20  # characters
_RESERVED_OPTIONS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template with its tools and variables.

    Args:
        tokenizer: tokenizer with a chat template.
        tools: JSON schemas of the tools that the model can call.
        options: further variables of the template, such as ``enable_thinking``.
        expand: function of a text and its images that replaces each placeholder by the text that stands for its image;
            None where messages have no images.
        of_row: whether the tools are those of a row, which a template without tools would lose.
        further_ends: tokens at which responses end, besides the tokenizer's end token.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    expand: Callable[[str, Sequence[EncodedImage]], str] | None = None
    of_row: bool = False
    further_ends: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens at which responses end; first the tokenizer's end token."""
        return (self.tokenizer.eos_token_id, *self.further_ends)

    def render(
        self,
        messages: Sequence[Message],
        label: str,
        generation: bool = False,
        expanded: bool = True,
        continues: bool = False,
    ) -> str:
        """Render messages as text.

        Args:
            messages: at least one message.
            label: name of the messages in error messages.
            generation: whether to add the generation prompt.
            expanded: whether the text contains what stands for each image, and not one placeholder.
            continues: whether the text ends within the last message, which the model continues.

        Raises:
            BadRow: the tokenizer has no template, the template rejects the messages, or the text is not valid UTF-8.
        """
        ends = {"continue_final_message": True} if continues else {"add_generation_prompt": generation}
        text = str(self.apply(messages, label, tokenize=False, **ends))
        if not is_unicode(text):
            raise BadRow(f"the {label} is not valid UTF-8 text")
        images = images_of(messages)
        if expanded and self.expand is not None:
            with as_bad_row():
                return self.expand(text, images)
        return text

    def render_prompt(self, messages: Sequence[Message], label: str = "prompt", expanded: bool = True) -> str:
        """Render the messages to which the model responds; words of the assistant at their end are continued."""
        begun = messages[-1]["role"] == "assistant"
        text = self.render(messages, label, generation=not begun, expanded=expanded, continues=begun)
        words = messages[-1]["content"]
        if begun and isinstance(words, str) and OPENS_THOUGHTS.search(words):
            before, found, _ = text.rpartition(words.strip())
            if found:  # the template takes the words for an answer without thoughts
                return _EMPTY_THOUGHTS.sub("", before) + text[len(before) :]
        return text

    def writes_before(self, messages: Sequence[Message], answer: str) -> bool:
        """Return whether an answer as text must be rendered, because it cannot just follow the rendered prompt.

        The template writes something before answers, such as empty thoughts, or the answer begins thoughts that the
        prompt has begun.

        Args:
            messages: messages of the prompt.
            answer: text of the answer.
        """
        if messages[-1]["role"] == "assistant":  # the answer continues its words
            return False
        prompt = self.render_prompt(messages, expanded=False)
        try:
            whole = [*messages, {"role": "assistant", "content": "zqanswerzq"}]
            answered = self.render(whole, "prompt", expanded=False)
        except BadRow:  # the template rejects this answer
            return False
        if OPENS_THOUGHTS.match(answer.lstrip()):
            return OPENS_THOUGHTS.search(prompt.rstrip()[-_LONGEST_TAG:]) is not None
        return not answered.startswith(f"{prompt}zqanswerzq")

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
                ends.add(next(iter(self.ids(after.lstrip())), None) if rendered else None)
        except BadRow:
            return None
        special = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        if len(ends) == 1 and ends <= special:
            return next(iter(ends))
        return None

    def writes_date(self) -> bool:
        """Return whether the template writes today's date into prompts, which are others tomorrow."""
        question, rendered = [{"role": "user", "content": "question"}], set()
        for date in ("1", "2"):
            fixed = replace(self, options={**self.options, "strftime_now": lambda form, date=date: date})
            try:
                rendered.add(fixed.render_prompt(question))
            except BadRow:
                return False
        return len(rendered) > 1

    @property
    def template(self) -> str:
        """The template that is used with these tools."""
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    @property
    def has_generation_marks(self) -> bool:
        """Whether the template marks the assistant's turns by ``{% generation %}``."""
        return _GENERATION_MARK.search(self.template) is not None

    def apply(self, messages: Sequence[Message], label: str, **arguments: Any) -> Any:
        """Apply the template to messages in its own dialect; ``arguments`` are those of ``apply_chat_template``."""
        if self.tokenizer.chat_template is None:
            raise BadRow(
                f"the {label} is a list of messages, but the tokenizer has no chat template: use that of a chat model, "
                "add chat_template.jinja to its directory, or write the text itself"
            )
        try:
            written = _dialect(self.tokenizer, self.template).write(messages)
            return self.tokenizer.apply_chat_template(written, tools=self.tools, **arguments, **self.options)
        except _TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template rejects the {label}: {error}") from error

    def ids(self, text: str) -> list[int]:
        """Tokenize a rendered text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class _Dialect(NamedTuple):
    """What a template expects in other places than the canonical form has it.

    Args:
        parts: whether texts must be parts of the content, as LLaVA's and SmolVLM's templates want.
        arguments_as_text: whether the arguments of calls must be JSON text, as DeepSeek's templates want.
        tool: name of the role of the tools' replies.
        thoughts: key of a message's thoughts.
        splits: whether thoughts at the beginning of a content must be given under that key, because the template writes
            its own, empty ones before the content.
    """

    parts: bool
    arguments_as_text: bool
    tool: str
    thoughts: str
    splits: bool

    def write(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template expects them."""
        return [self._write(message) for message in messages]

    def _write(self, message: Message) -> Message:
        written = dict(message)
        if message["role"] == "tool":
            written["role"] = self.tool
        if self.thoughts != THOUGHTS and THOUGHTS in message:
            written[self.thoughts] = written.pop(THOUGHTS)
        elif self.splits and message["role"] == "assistant" and (thinks := _thinks(message)):
            written |= {self.thoughts: thinks[1].strip(), "content": thinks[2].lstrip()}
        if self.arguments_as_text and message.get("tool_calls"):
            written["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        if self.parts and isinstance(message.get("content"), str):
            written["content"] = [{"type": "text", "text": message["content"]}]
        return written


@lru_cache(maxsize=8)
def _dialect(tokenizer: PreTrainedTokenizerBase, template: str) -> _Dialect:
    """Find out what a template expects by trying it and by the names that it reads.

    Args:
        tokenizer: tokenizer with the template.
        template: chat template.
    """

    def rendered(*messages: Message) -> str:
        try:
            return str(tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False))
        except _TEMPLATE_ERRORS:  # it needs other messages
            return ""

    question = {"role": "user", "content": "question"}
    in_parts = {"role": "user", "content": [{"type": "text", "text": "question"}]}
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    as_object = {"role": "assistant", "content": "", "tool_calls": [call]}
    as_text = {**as_object, "tool_calls": [_with_text_arguments(call)]}
    wants_text = '{"at": "sky"}' in rendered(question, as_text) and "{'at': 'sky'}" in rendered(question, as_object)
    refuses_objects = "look" in rendered(question, as_text) and not rendered(question, as_object)
    as_wanted = as_text if wants_text or refuses_objects else as_object
    reply = {"content": "reply", "name": "look", "tool_call_id": "call00001"}
    key = next((key for key in (THOUGHTS, "reasoning", "thinking") if _reads(template, key)), THOUGHTS)
    in_content = rendered(question, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"})
    under_key = rendered(question, {"role": "assistant", "content": "yes", key: "hm"})
    return _Dialect(
        parts="question" not in rendered(question) and "question" in rendered(in_parts),
        arguments_as_text=wants_text or refuses_objects,
        tool=_tool_role(lambda role: rendered(question, as_wanted, {**reply, "role": role})),
        thoughts=key,
        splits="hm" in under_key and in_content.count("<think>") > under_key.count("<think>") > 0,
    )


def begins_within_thoughts(text: str) -> bool:
    """Return whether a text closes thoughts that it has not begun, because the prompt begins them."""
    closed, opened = CLOSES_THOUGHTS.search(text), OPENS_THOUGHTS.search(text)
    return closed is not None and (opened is None or closed.start() < opened.start())


def _thinks(message: Message) -> re.Match[str] | None:
    """Match the thoughts at the beginning of a message's text, and the text behind them."""
    content = message.get("content")
    return re.match(r"\s*<think>(.*?)</think>(.*)", content, re.DOTALL) if isinstance(content, str) else None


def _tool_role(render: Callable[[str], str]) -> str:
    """Return the role of a tool's reply that a template knows: one that it renders otherwise than any name.

    Args:
        render: function of a role that renders a conversation with the reply; an empty text if the template rejects it.
    """
    invented = render("zqrolezq")
    for role in ("tool", "ipython", "observation", "function"):
        rendered = render(role)
        if "reply" in rendered and rendered != invented.replace("zqrolezq", role):
            return role
    return "tool"


def _names(template: str, text: str) -> bool:
    """Return whether a template contains a quoted text."""
    return f"'{text}'" in template or f'"{text}"' in template


def _reads(template: str, key: str) -> bool:
    """Return whether a template reads a key of a mapping."""
    return _names(template, key) or re.search(rf"\.{key}\b", template) is not None


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are JSON text."""
    function = call.get("function")
    if function is None or isinstance(function["arguments"], str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def chat_of(
    tokenizer: PreTrainedTokenizerBase,
    fields: Fields,
    options: Mapping[str, Any],
    default_tools: Sequence[Any] = (),
    expand: Callable[[str, Sequence[EncodedImage]], str] | None = None,
    further_ends: tuple[int, ...] = (),
) -> Chat:
    """Return the chat template with a row's ``tools``; the row's ``chat_template_kwargs`` override the configuration's.

    Args:
        tokenizer: tokenizer with a chat template.
        fields: fields of the row.
        options: template variables of the configuration.
        default_tools: JSON schemas of the tools of rows without ``tools``.
        expand: argument of :class:`Chat`.
        further_ends: argument of :class:`Chat`.

    Raises:
        BadRow: the row's tools or template variables are not valid.
    """
    tools = _tools_of(fields)
    row_options = fields.get("chat_template_kwargs")
    if row_options is not None and not isinstance(row_options, Mapping):
        raise BadRow(f"chat_template_kwargs is a {type(row_options).__name__}, expected a mapping of names to values")
    merged = {**options, **(row_options or {})}
    check_options(merged, BadRow)
    return Chat(
        tokenizer, tools or list(default_tools) or None, merged, expand, of_row=bool(tools), further_ends=further_ends
    )


def _tools_of(fields: Fields) -> list[Any] | None:
    """Return the schemas of a row's tools, which can be JSON text; ``functions`` of OpenAI's first API become tools.

    Raises:
        BadRow: they are not a list of schemas.
    """
    tools = _parsed(fields.get("tools"), fields)
    if isinstance(tools, list):
        tools = [_parsed(tool, fields) for tool in tools]
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        column = fields.names["tools"]
        raise BadRow(
            f"{column} must be a list of JSON schemas of tools; {fields.leave_out('tools')}",
            f"{column} is not a list of JSON schemas",
        )
    if tools and fields.names.get("tools") == "functions":
        return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return tools


def _parsed(value: Any, fields: Fields) -> Any:
    """Return the value of a JSON text, None of a blank text, as in an empty cell; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        column, reason = fields.names["tools"], error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRow(
            f"{column} is not valid JSON: {reason}; {fields.leave_out('tools')}", f"{column} is not valid JSON"
        ) from error


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
