"""Messages of a row in one canonical form: roles, texts, tool calls, thoughts, and the marks of turns to learn.

The form is that of OpenAI's API and of transformers: the roles system, developer, user, assistant and tool; ``content``
is text or parts; the ``arguments`` of ``tool_calls`` are objects; thoughts are in ``reasoning_content``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.image_parts import content_of
from lightning_rlhf.data.json_messages import parse_messages
from lightning_rlhf.data.roles import CALL_ROLES, OTHER_ROLES, ROLES, is_known, role_of
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.expected_errors import UsageError

Message = dict[str, Any]
THOUGHTS = "reasoning_content"
_PAIR_OF_TURNS = {"human", "assistant"}  # keys of a question with its answer in ms-swift's ShareGPT
# Keys of a message's thoughts: vLLM, OpenRouter, Anthropic, data of agents.
_THOUGHTS = (THOUGHTS, "reasoning", "reasoning_details", "thinking", "thought", "thoughts")
_THOUGHT_PARTS = ("reasoning", "thinking")  # types of parts of the content that are thoughts
_THOUGHT_TEXTS = ("text", "thinking", "reasoning", "content", "value", "summary")  # keys of a part's thoughts
# Names under which data sets say whether to learn a turn: OpenAI and axolotl, LLaMA-Factory, ms-swift.
_LEARN = ("weight", "train", "training", "loss_weight", "loss")


def holds_messages(value: Any) -> bool:
    """Return whether a value is treated as messages: any list or mapping, even if malformed."""
    return isinstance(value, list | Mapping)


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the items, such as messages or characters, that two sequences share from the beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def messages_of(value: Any, label: str, roles: Mapping[str, str] | None = None) -> list[Message]:
    """Return messages in the canonical form.

    Content is text, or a list of parts if one of them is an image; parts that are all text become one text. Calls that
    are messages of their own become part of the assistant's message before them.

    Args:
        value: a list of messages, a single message, or the JSON text of either.
        label: name of the messages in error messages, such as ``prompt``.
        roles: further names of roles, each with its role here.

    Raises:
        BadRow: the value is not a list of messages, a speaker is not known, or a tool call is malformed.
    """
    value = parse_messages(value, roles)
    messages = [value] if isinstance(value, Mapping) else value
    malformed = f"every message of a {label} needs 'role' and text or parts in 'content'"
    if isinstance(messages, list) and messages and all(isinstance(each, str) for each in messages):
        remedy = ": take the text out of its list" if label == "prompt" else ""
        raise BadRow(f"{malformed}, got a list of texts{remedy}")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise BadRow(malformed)
    if all(message.keys() == _PAIR_OF_TURNS for message in messages):
        messages = [{"role": role, "content": message[role]} for message in messages for role in ("human", "assistant")]
    canonical: list[Message] = []
    for written in messages:
        message = _canonical(written, malformed, roles or {})
        if canonical and canonical[-1]["role"] == "assistant" and _is_call(written, roles or {}):
            message = _joined(canonical.pop(), message)
        canonical.append(message)
    return canonical


def check_roles(roles: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the configured names of roles; their roles must be known.

    Raises:
        ValueError: a role is not one of those that this package knows.
    """
    for name, role in (roles or {}).items():
        if role not in ROLES:
            raise UsageError(f"roles maps {name!r} to {role!r}, expected one of {', '.join(ROLES)}")
    return roles or {}


def without_flags(messages: Sequence[Message]) -> list[Message]:
    """Return messages without the keys that say whether to learn a turn."""
    return [{key: value for key, value in message.items() if key not in _LEARN} for message in messages]


def is_learned(message: Message) -> bool:
    """Return whether the assistant's message is to be learned; without a flag, it is.

    Raises:
        BadRow: a flag is neither true nor false, 1 nor 0, flags differ, or a message of another role asks for it; or
            the message has axolotl's spans of text to learn, which are not supported.
    """
    if message.get("train_detail"):
        raise BadRow(
            "a message has train_detail, spans of its text to learn, but messages are learned as a whole: remove "
            "train_detail, and set train: true or false for the whole message",
            "a message has train_detail, which is not supported",
        )
    flags = {name: message[name] for name in _LEARN if name in message}
    for name, value in flags.items():
        if value not in (0, 1) or isinstance(value, str):
            raise BadRow(f"a message has {name} {value!r}, expected 0 or 1", f"a message has a {name} between 0 and 1")
    if len({bool(value) for value in flags.values()}) > 1:
        raise BadRow(f"a message has {flags}, which contradict each other", "flags of a message contradict each other")
    wanted = all(flags.values())
    asked = [name for name in flags if name in ("train", "training", "loss") and wanted]
    if message["role"] != "assistant" and asked:
        raise BadRow(
            f"a message of the role {message['role']!r} has {asked[0]}: true; only the assistant's can be learned",
            f"a message of another role than assistant has {asked[0]}: true",
        )
    return wanted and message["role"] == "assistant"


def history_messages(fields: Fields) -> list[Message]:
    """Return the messages of earlier turns that are pairs of a question and an answer, as in Alpaca's format.

    Raises:
        BadRow: the row's ``history`` is not a list of pairs of texts.
    """
    history = fields.get("history")
    pairs = [] if _is_blank(history) else _parsed_list(history)
    if not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(t, str) for t in pair) for pair in pairs
    ):
        column = fields.names["history"]
        raise BadRow(
            f'column {column!r} must be a list of pairs of a question and an answer, such as [["hi", "hello"]]; '
            f"{fields.leave_out('history')}",
            f"column {column!r} is not a list of pairs of a question and an answer",
        )
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _parsed_list(value: Any) -> list[Any]:
    """Return a list, or that of a JSON text; of anything else a list that has no pair."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
    return value if isinstance(value, list) else [value]


def _canonical(message: Mapping[str, Any], malformed: str, roles: Mapping[str, str]) -> Message:
    """Return one message in the canonical form."""
    is_call = _is_call(message, roles)
    # Formats with fixed keys, such as parquet, store missing keys of a message as null.
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        message = {"role": speaker, **({"content": message.pop("value")} if "value" in message else {}), **message}
        if not is_known(speaker, roles):
            known = sorted({*ROLES, *OTHER_ROLES, *roles})
            raise BadRow(
                f"a message is from {speaker!r}, expected one of {known}; data.init_args.roles adds others, such as "
                f"roles: {{{speaker}: user}}",
                "a message is from an unknown speaker",
            )
    if not isinstance(message.get("role"), str):
        raise BadRow(malformed)
    message["role"] = role_of(message["role"], roles)
    if is_call:
        message = {**message, "content": "", "tool_calls": _calls_of_text(message.get("content"))}
    thoughts = _move_parts(message)
    _move_calls(message)
    _move_thoughts(message, thoughts)
    if "content" not in message and (message.get("tool_calls") or THOUGHTS in message):
        message["content"] = ""
    content = content_of(message.get("content"))
    if content is None:
        raise BadRow(malformed)
    return {**message, "content": content}


def _is_call(message: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    """Return whether the content of a message is tool calls, according to its role."""
    name = message.get("role") or message.get("from")
    return isinstance(name, str) and name.lower() in CALL_ROLES and name not in roles


def _joined(message: Message, call: Message) -> Message:
    """Return a message of the assistant with the calls of the next message, which ms-swift's format stores apart.

    As two turns, the model would learn to end its turn after the text or the first call.

    Raises:
        BadRow: only one of the two is to be learned, or both have thoughts.
    """
    if is_learned(message) != is_learned(call):
        raise BadRow(
            "a tool call has another flag for learning (weight, train, loss) than the message of the assistant that it "
            "continues; set the same flag in both",
            "a tool call has another flag for learning than its message",
        )
    if THOUGHTS in message and THOUGHTS in call:
        raise BadRow("a tool call has thoughts, and the message of the assistant that it continues has others")
    return {**call, **message, "tool_calls": [*message.get("tool_calls", []), *call["tool_calls"]]}


def _move_parts(message: Message) -> list[Any]:
    """Move calls that are parts of the content, as in LLaMA-Factory's second format, to their key.

    Returns:
        The parts that are thoughts, which are removed from the content.
    """
    parts = message.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return []
    thoughts = [part for part in parts if part.get("type") in _THOUGHT_PARTS]
    calls = [part.get("value", part.get("text")) for part in parts if part.get("type") == "tool_call"]
    message["content"] = [
        {**part, "text": part["value"]} if part.get("type") == "text" and "value" in part else part
        for part in parts
        if part.get("type") not in (*_THOUGHT_PARTS, "tool_call")
    ]
    if calls and message.get("tool_calls"):
        raise BadRow("a message has tool calls in its content and in tool_calls")
    if calls:
        message["tool_calls"] = [call for value in calls for call in _calls_of_text(value)]
    if not message["content"] and (thoughts or calls):
        message["content"] = ""
    return thoughts


def _move_calls(message: Message) -> None:
    """Bring the calls of a message into the form of ``tool_calls``, each with an object as its arguments."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = [] if _is_blank(calls) else _calls_of_text(calls)
    if not _is_blank(function_call := message.pop("function_call", None)):  # of OpenAI's first API
        calls = [*(calls or []), *_calls_of_text(function_call)]
    if not calls:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow("tool_calls must be a list of calls", "tool_calls is not a list of calls")
    message["tool_calls"] = [_call(without_missing(call)) for call in calls]


def without_missing(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call without its null keys, which formats with fixed keys store for missing ones."""
    return {key: value for key, value in call.items() if value is not None}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object; ``{name: ..., arguments: ...}`` becomes the form of OpenAI's API."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = {key: value for key, value in call.items() if key not in ("id", "type")}
        call = {**{key: call[key] for key in ("id",) if key in call}, "type": "function"}
    if not isinstance(function.get("name"), str):
        raise BadRow("a tool call has no name", "a tool call has no name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if arguments is None and function.get("arguments") is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise BadRow(
            f"the arguments of the tool call {function['name']!r} are {function.get('arguments')!r}, expected a JSON "
            f"object",
            "the arguments of a tool call are not a JSON object",
        )
    rest = {key: value for key, value in function.items() if key not in ("name", "arguments", "parameters")}
    return {**call, "function": {"name": function["name"], "arguments": dict(arguments), **without_missing(rest)}}


def _calls_of_text(text: Any) -> list[dict[str, Any]]:
    """Return the calls of a message whose content is a call, or a list of calls, as JSON."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow(
            f"a tool call is {text!r}, expected a JSON object with 'name' and 'arguments'", "a tool call is not JSON"
        )
    return [_call(dict(call)) for call in calls]


def _move_thoughts(message: Message, parts: Sequence[Any]) -> None:
    """Put the thoughts of a message, and those among the parts of its content, under one name."""
    if any(isinstance(message.get(name), str) and message[name].strip() for name in (THOUGHTS, "reasoning")):
        message.pop("reasoning_details", None)  # OpenRouter's parts of the same thoughts, some of them encrypted
    given = {name: _thoughts_text(value, name) for name in _THOUGHTS if (value := message.pop(name, None))}
    if parts:
        given["content"] = _thoughts_text(parts, "content")
    texts = {text.strip(): text for text in given.values() if text.strip()}
    if len(texts) > 1:
        raise BadRow(f"a message has different thoughts in {' and '.join(given)}", "a message has different thoughts")
    if texts:
        message[THOUGHTS] = next(iter(texts.values()))


def _thoughts_text(value: Any, name: str) -> str:
    """Return thoughts that are a text, a part with a text, or a list of these.

    Args:
        value: thoughts of a message.
        name: key of the message under which they are.

    Raises:
        BadRow: there are thoughts that are not text, such as encrypted ones.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_thoughts_text(item, name) for item in value)
    if isinstance(value, Mapping):
        texts = [value[key] for key in _THOUGHT_TEXTS if value.get(key)]
        if len(texts) == 1 or (not texts and value.keys() & set(_THOUGHT_TEXTS)):
            return _thoughts_text(texts, name)
    what = f"a part with the keys {sorted(map(str, value))}" if isinstance(value, Mapping) else repr(value)
    raise BadRow(
        f"the thoughts of a message in {name!r} are {what}, expected text, or parts that have it in one of the keys "
        f"{', '.join(_THOUGHT_TEXTS)}",
        f"the thoughts of a message in {name!r} are not text",
    )


def _is_blank(value: Any) -> bool:
    """Return whether a value is null, or a text without words, as a table stores a missing value."""
    return value is None or (isinstance(value, str) and not value.strip())
