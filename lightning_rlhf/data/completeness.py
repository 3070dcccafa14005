"""The check that a chat template renders all that a conversation has.

A template is a program that may leave out whatever it does not know: a role, thoughts, calls, tools. So each text of a
conversation is replaced by a word that occurs nowhere else, and the words that are missing in the rendering are what
the template leaves out. Conversations of the same shape are rendered once.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.image_parts import is_image
from lightning_rlhf.data.messages import THOUGHTS, Message
from lightning_rlhf.data.row import BadRow

# Tags within a text of the assistant, which templates look for: those around thoughts, and special tokens.
_TAGS = re.compile(
    r"(</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|[^<>|]{1,30}\|?>|<[^<>|]{1,30}\|>)"
)
_OPENS_THOUGHTS = re.compile(r"<(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]|<\|channel>")
_PREVIEW = 40  # characters of a lost text in a message


class Part(NamedTuple):
    """A part of a conversation.

    Args:
        kind: what it is.
        message: index of its message; -1 for a tool.
        name: name of the tool or of the called function.
    """

    kind: Literal["content", "thoughts", "call", "tool"]
    message: int
    name: str = ""


@dataclass(frozen=True)
class Marked:
    """A conversation whose texts are words that occur nowhere else.

    Args:
        messages: messages with these words in place of their texts.
        tools: schemas with a word in place of each name; None without tools.
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
    pieces, thinks = [], False
    for piece in _TAGS.split(content):
        if _TAGS.fullmatch(piece):
            thinks = _OPENS_THOUGHTS.fullmatch(piece) is not None
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
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return {**tool, "function": {**function, "name": word(Part("tool", -1, function["name"]))}}
    if isinstance(tool.get("name"), str):
        return {**tool, "name": word(Part("tool", -1, tool["name"]))}
    return tool


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
    key = json.dumps([marked.messages, marked.tools, dict(chat.options)], sort_keys=True, default=str)
    rendered = _render(chat.tokenizer, chat.template, key, generation)
    lost = [part for word, part in marked.words.items() if rendered is not None and word not in rendered]
    return list(dict.fromkeys(part for part in lost if part.kind != "tool" or chat.of_row))


@lru_cache(maxsize=4096)
def _render(tokenizer: PreTrainedTokenizerBase, template: str, key: str, generation: bool) -> str | None:
    """Render marked messages; None if the template rejects them. The template is part of the cache's key only."""
    messages, tools, options = json.loads(key)
    chat = Chat(tokenizer, tools, options)
    try:
        return chat.render_prompt(messages) if generation else chat.render(messages, "conversation")
    except BadRow:
        return None


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
    kinds = {"thoughts" if part.kind == "thoughts" else "texts beside tool calls" for part in lost}
    return [f"the chat template leaves out {kind} of earlier messages" for kind in sorted(kinds)]


def _is_left_out_on_purpose(chat: Chat, messages: Sequence[Message], part: Part) -> bool:
    """Return whether a part is missing only because other messages follow: thoughts, and texts that were thoughts."""
    if part.kind == "thoughts":
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
    text = str(messages[part.message].get("content"))
    preview = text if len(text) <= _PREVIEW else text[:_PREVIEW] + "..."
    return BadRow(
        f"the chat template leaves out message {part.message} of the {label}, of the role {role!r}: {preview!r}; if "
        f"another role is meant, map it by data.init_args.roles, such as roles: {{{role}: system}}",
        f"the chat template leaves out messages of the role {role!r}",
    )


def answer_words(messages: Sequence[Message], turn: int) -> tuple[list[Message], list[str]]:
    """Return messages up to a turn with words in place of the turn's texts only, and those words."""
    before = list(messages[:turn])
    marked = mark([*[{**message, "content": ""} for message in before], messages[turn]])
    words = [word for word, part in marked.words.items() if part.message == turn]
    return [*before, marked.messages[-1]], words


def first_place(text: str, words: Sequence[str]) -> int | None:
    """Return the position of the first of some words in a text; None if it has none of them."""
    places = [text.find(word) for word in words]
    return min(itertools.filterfalse(lambda place: place < 0, places), default=None)
