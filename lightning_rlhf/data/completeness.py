"""The check that a chat template renders all that a conversation has.

A template is a program that may leave out whatever it does not know: a role, thoughts, calls, tools. So each text of a
conversation is replaced by a word that occurs nowhere else, and the words that are missing in the rendering are what
the template leaves out. Conversations of the same shape are rendered once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from lightning_rlhf.data.chat import OPENS_THOUGHTS, Chat, begins_within_thoughts
from lightning_rlhf.data.image_parts import is_image
from lightning_rlhf.data.messages import THOUGHTS, Message
from lightning_rlhf.data.row import BadRow

# Tags within a text of the assistant, which templates look for: those around thoughts, and special tokens.
_TAGS = re.compile(
    r"(</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|[^<>|]{1,30}\|?>|<[^<>|]{1,30}\|>)"
)
_MOST_SHAPES = 4096
_LOST: dict[tuple[int, bytes], tuple[str, ...]] = {}  # lost words of each tokenizer's shapes of conversations
_KINDS_LEFT_OUT = {
    "thoughts": "thoughts of earlier messages",
    "content": "texts beside tool calls of earlier messages",
    "description": "descriptions of tools",
}
_PREVIEW = 40  # characters of a lost text in a message


class Part(NamedTuple):
    """A part of a conversation.

    Args:
        kind: what it is.
        message: index of its message; -1 for a part of a tool.
        name: name of the tool or of the called function.
    """

    kind: Literal["content", "thoughts", "call", "tool", "parameter", "description"]
    message: int
    name: str = ""


@dataclass(frozen=True)
class Marked:
    """A conversation whose texts are words that occur nowhere else.

    Args:
        messages: messages with these words in place of their texts.
        tools: schemas with words in place of names and descriptions; None without tools.
        words: the part of the conversation to which each word belongs.
    """

    messages: list[Message]
    tools: list[Any] | None
    words: dict[str, Part]


def mark(messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Marked:
    """Replace the texts of a conversation by words that occur nowhere else.

    Args:
        messages: messages in the canonical form.
        tools: schemas of the tools.
    """
    words: dict[str, Part] = {}

    def word(part: Part) -> str:
        words[made := f"qz{len(words)}zq"] = part
        return made

    ids: dict[str, str] = {}
    marked = [_marked_message(message, number, word, ids) for number, message in enumerate(messages)]
    return Marked(marked, None if tools is None else [_marked_tool(tool, word) for tool in tools], words)


def _marked_message(message: Message, number: int, word: Callable[[Part], str], ids: dict[str, str]) -> Message:
    """Return a message with words in place of its texts; its keys and the structure of its content stay."""
    marked = dict(message)
    marked["content"] = _marked_content(message, number, word)
    if message.get(THOUGHTS, "").strip():
        marked[THOUGHTS] = word(Part("thoughts", number))
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, number, word, ids) for call in calls]
    if "tool_call_id" in message:  # ids of nine letters and digits, as Mistral's templates want
        marked["tool_call_id"] = ids.setdefault(str(message["tool_call_id"]), f"call{len(ids):05}")
    return marked


def _marked_content(message: Message, number: int, word: Callable[[Part], str]) -> Any:
    content = message.get("content", "")
    if isinstance(content, list):
        return [
            {"type": "image", "image": ""}
            if is_image(part)
            else {"type": "text", "text": word(Part("content", number))}
            for part in content
        ]
    if message["role"] != "assistant":
        return word(Part("content", number)) if content.strip() else content
    pieces, thinks = [], begins_within_thoughts(content)
    for piece in _TAGS.split(content):
        if _TAGS.fullmatch(piece):
            thinks = OPENS_THOUGHTS.fullmatch(piece) is not None
        elif piece.strip():
            piece = word(Part("thoughts" if thinks else "content", number))
        pieces.append(piece)
    return "".join(pieces)


def _marked_call(call: dict[str, Any], number: int, word: Callable[[Part], str], ids: dict[str, str]) -> dict[str, Any]:
    function = call["function"]
    part = Part("call", number, function["name"])

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [marked(item) for item in value]
        return word(part) if isinstance(value, str) and value.strip() else value

    result = {**call, "function": {**function, "name": word(part), "arguments": marked(function["arguments"])}}
    if "id" in call:
        result["id"] = ids.setdefault(str(call["id"]), f"call{len(ids):05}")
    return result


def _marked_tool(tool: Any, word: Callable[[Part], str]) -> Any:
    """Return a tool with words in place of its name and description, and of those of its parameters."""
    nested = isinstance(tool.get("function"), dict)
    function = tool["function"] if nested else tool
    if not isinstance(function.get("name"), str):
        return tool
    name = function["name"]
    marked = {**function, "name": word(Part("tool", -1, name))}
    if _is_text(function.get("description")):
        marked["description"] = word(Part("description", -1, name))
    if isinstance(function.get("parameters"), dict):
        marked["parameters"] = _marked_parameters(function["parameters"], name, word)
    return {**tool, "function": marked} if nested else marked


def _marked_parameters(schema: dict[str, Any], tool: str, word: Callable[[Part], str]) -> dict[str, Any]:
    """Return the schema of a tool's parameters with words in place of their names and descriptions.

    Data sets that write the parameters themselves in place of the schema have words at the same places.
    """
    inside = schema.get("properties") if isinstance(schema.get("properties"), dict) else None
    properties = inside if inside is not None else {k: v for k, v in schema.items() if isinstance(v, dict)}
    names = {name: word(Part("parameter", -1, tool)) for name in properties}
    marked = {
        names[name]: {**value, "description": word(Part("description", -1, tool))}
        if isinstance(value, dict) and _is_text(value.get("description"))
        else value
        for name, value in properties.items()
    }
    if inside is None:
        return {**{key: value for key, value in schema.items() if key not in names}, **marked}
    required = schema.get("required")
    if isinstance(required, list):
        schema = {**schema, "required": [names.get(name, name) for name in required]}
    return {**schema, "properties": marked}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def left_out(chat: Chat, messages: Sequence[Message], generation: bool = False) -> list[Part]:
    """Return the parts of a conversation that the template leaves out.

    Args:
        chat: chat template; tools that are not those of a row are not looked for.
        messages: messages in the canonical form.
        generation: whether the text is a prompt, whose last message is continued if it is the assistant's.

    Returns:
        Each part once; nothing where the template rejects the words in place of the texts.
    """
    marked = mark(messages, chat.tools)
    shape = json.dumps([marked.messages, marked.tools, dict(chat.options), chat.template, generation], default=str)
    key = id(chat.tokenizer), hashlib.sha256(shape.encode(errors="replace")).digest()
    lost = _LOST.get(key)
    if lost is None:
        if len(_LOST) >= _MOST_SHAPES:
            _LOST.clear()
        lost = _LOST[key] = _lost_words(replace(chat, tools=marked.tools, expand=None), marked, generation)
    parts = [marked.words[word] for word in lost]
    return list(dict.fromkeys(part for part in parts if part.message >= 0 or chat.of_row))


def _lost_words(chat: Chat, marked: Marked, generation: bool) -> tuple[str, ...]:
    """Return the words that the template leaves out; none if it rejects the words in place of the texts."""
    try:
        messages = marked.messages
        text = chat.render_prompt(messages) if generation else chat.render(messages, "conversation")
    except BadRow:
        return ()
    return tuple(word for word in marked.words if word not in text)


def check_complete(
    chat: Chat, messages: Sequence[Message], label: str, learned: Sequence[int] = (), generation: bool = False
) -> list[str]:
    """Check that the template renders all that a conversation has.

    Args:
        chat: chat template.
        messages: messages in the canonical form.
        label: name of the messages in error messages.
        learned: indices of the messages that are learned, whose thoughts must be rendered too.
        generation: argument of :func:`left_out`.

    Returns:
        Sentences without values about what the template leaves out on purpose of messages that are not learned, such
        as their thoughts; empty if it leaves out nothing.

    Raises:
        BadRow: a message, a call, a tool or thoughts that are learned would be lost.
    """
    lost = left_out(chat, messages, generation)
    for part in lost:
        if part.message in learned or not _is_left_out_on_purpose(chat, messages, part):
            raise _lost(part, messages, label)
    kinds = {_KINDS_LEFT_OUT[part.kind] for part in lost}
    return [f"the chat template leaves out {kind}" for kind in sorted(kinds)]


def _is_left_out_on_purpose(chat: Chat, messages: Sequence[Message], part: Part) -> bool:
    """Return whether a part may be missing: thoughts and texts before other messages, and descriptions of tools."""
    if part.kind in ("thoughts", "description"):
        return True
    is_text = part.kind == "content" and messages[part.message]["role"] == "assistant"
    return is_text and part not in left_out(chat, messages[: part.message + 1])


def _lost(part: Part, messages: Sequence[Message], label: str) -> BadRow:
    """Return the error about a part that the template leaves out."""
    if part.kind == "tool":
        return BadRow(
            f"the chat template leaves out the tool {part.name!r} of the column tools: use a tokenizer whose template "
            f"has tools, or describe them in the messages and set data.init_args.columns: {{tools: null}}",
            "the chat template leaves out the tools of the column tools",
        )
    if part.kind == "parameter":
        return BadRow(
            f"the chat template leaves out parameters of the tool {part.name!r} of the column tools: its parameters "
            f"must be a JSON schema, such as {{type: object, properties: {{city: {{type: string}}}}}}",
            "the chat template leaves out parameters of the tools of the column tools",
        )
    role = messages[part.message]["role"]
    if part.kind == "call":
        return BadRow(
            f"the chat template leaves out the call of {part.name!r} in message {part.message} of the {label}: use a "
            f"tokenizer whose template has tools, or write calls as text",
            "the chat template leaves out a tool call",
        )
    if part.kind == "thoughts":
        return BadRow(
            f"the chat template leaves out the thoughts ({THOUGHTS}) of message {part.message} of the {label}, which "
            f"are to be learned: remove them from the rows, or write them into the content as the model does",
            f"the chat template leaves out the thoughts ({THOUGHTS}) of an answer",
        )
    advice = f"if another role is meant, map it by data.init_args.roles, such as roles: {{{role}: system}}"
    if role == "assistant":
        advice = "write it into a message that the template renders, or leave the row out"
    elif role == "system":
        advice = "use a template with system messages, or write the text into the message of the user"
    text = str(messages[part.message].get("content"))
    preview = text if len(text) <= _PREVIEW else text[:_PREVIEW] + "..."
    return BadRow(
        f"the chat template leaves out message {part.message} of the {label}, of the role {role!r}: {preview!r}; "
        f"{advice}",
        f"the chat template leaves out messages of the role {role!r}",
    )


class Header(NamedTuple):
    """What a template renders around the texts of a turn.

    Args:
        before: text before the first of them, from the beginning of the conversation.
        after: text behind the last of them.
        thinks: whether the first of them is thoughts.
    """

    before: str
    after: str
    thinks: bool


def header_of(chat: Chat, messages: Sequence[Message], turn: int) -> Header | None:
    """Return what the template renders around the texts of a turn; None if it renders none of them."""
    before = list(messages[:turn])
    marked = mark([*[{**message, "content": ""} for message in before], messages[turn]])
    text = chat.render([*before, marked.messages[-1]], "conversation")
    words = {word: part for word, part in marked.words.items() if part.message == turn and word in text}
    if not words:
        return None
    first = min(words, key=text.find)
    end = max(text.rfind(word) + len(word) for word in words)
    return Header(text[: text.find(first)], text[end:], words[first].kind == "thoughts")
