"""The protocol of environments: turns of the policy and replies of the environment.

This file does not import torch, so that worker processes start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast

from PIL import Image

from lightning_rlhf.calls.private import private
from lightning_rlhf.data.image_parts import content_of, is_image
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.images import BadImage, ImageSettings, reader

Message = dict[str, Any]
ROLES = ("user", "tool", "system")  # roles that messages of an environment may have
LARGEST_TEXT = 1_000_000  # characters of all messages of a reply; the rest is cut
_LIMITS = ImageSettings()
_FLOAT32_MAX = 3.4028234663852886e38
_EXPECTED = {
    "reset": "a Reply, a text or None",
    "step": "a Reply or a text",
    "finish": "a Reply, a number or None",
    "run": "a Reply, a number or None",
}


class ToolError(Exception):
    """Raise it in a tool for a mistake of the policy, which then receives your text as the tool's result."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a turn.

    Args:
        name: name of the tool.
        arguments: values by argument name.
        id: identifier of the call, if the policy wrote one.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy. If a limit cut it, only ``finish`` gets it, because it ends the conversation.

    Args:
        text: text without special tokens and without tool calls.
        calls: tool calls, in order.
        malformed: description of the first tool call that could not be parsed. None if all could.
        number: index of the turn in the conversation, from 0.
        raw: text with special tokens and tool calls.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str | None = None
    number: int = 0
    raw: str = ""


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn.

    Args:
        messages: messages that the policy reads next. A text is a single message, from a tool if the turn called one,
            otherwise from the user. The content of a message is a text, or a list of texts and images of Pillow. An
            empty text is a message without content. Ignored if ``done``.
        reward: reward of the turn, or of the start for a reply of ``reset``, finite.
        done: whether the conversation ends.
        metrics: numbers to log, by name. You find their means over conversations as ``env/<name>``.
    """

    messages: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """Base class of environments. Your class needs its methods, but need not inherit from it.

    Each conversation gets a new object. Its replies must depend only on the row, the seed and the turns, so that a
    conversation can be repeated. You can make any method ``async``, and leave out arguments that you do not use.
    ``step`` may take ``text`` or ``calls`` instead of ``turn``.
    """

    def reset(self, *arguments: Any, **named: Any) -> Any:
        """Start a conversation: ``reset(self, row, seed)``.

        ``row`` contains the columns of the prompt's row, with its text as ``prompt`` and its chat messages, if any, as
        ``messages``. ``seed`` is in [0, 2**63). All responses to a prompt in a step get the same ``seed``, so you
        compare them in the same environment.

        Returns:
            ``Reply`` or text with messages that are appended to the prompt. None leaves the prompt as it is.
        """
        return None

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Return the reply to a turn: ``step(self, turn)``, ``step(self, text)`` or ``step(self, calls)``.

        Returns:
            ``Reply``, or a text, which does not end the conversation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def finish(self, *arguments: Any, **named: Any) -> Any:
        """Return the reward of a conversation that a limit ended: ``finish(self, stop, turn)``.

        It is called once, before ``close``, if neither ``step`` nor an error ended the conversation. ``stop`` tells you
        why: ``max_turns``, ``truncated`` (a limit cut the last turn), ``tokens`` (none is left for another turn),
        ``images`` (a reply contained more than ``max_images`` allows) or ``malformed`` (the turn cannot be rendered in
        the chat template). ``turn``, or ``text``, is the last turn. If it was cut, it was never passed to ``step``.

        Returns:
            Number, which is added to the reward of the last turn, ``Reply`` with reward and metrics, or None.
        """
        return None

    def close(self) -> Any:
        """Release resources. It is called once, even after an error."""


class Agent:
    """Base class of agents. An agent asks for turns of the policy itself, through OpenAI's chat API.

    Use it if your code already drives the conversation. Your class needs its method, but need not inherit from it. Each
    conversation gets a new object. You can make the method ``async``, so that the agents share an event loop, and leave
    out arguments that you do not use.
    """

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Run until the task is done, with turns from the policy: ``run(self, base_url, api_key, row, seed)``.

        Pass ``base_url`` to OpenAI's client, for example ``http://127.0.0.1:40001/v1``, and ``api_key`` as the key of
        this conversation. The model is ``policy``. You get ``row`` and ``seed`` as in :meth:`Environment.reset`.

        Returns:
            ``Reply`` with reward and metrics, or the reward, which belongs to the last turn. None is a reward of 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run()")


class InvalidReplyError(UsageError):
    """Error for a value that is not a valid reply."""


def as_reply(value: Any, method: str) -> Reply:
    """Validate the value that an environment returned, and convert it to a reply with plain values.

    Args:
        value: returned value.
        method: method that returned it, ``reset``, ``step``, ``finish``, or ``run`` of an agent.

    Raises:
        InvalidReplyError: the value is not a reply, or a part of it has a wrong type or value.
    """
    ends_conversation = method in ("run", "finish")
    if value is None and method != "step":
        return Reply()
    if ends_conversation and isinstance(value, Real) and not isinstance(value, bool):
        value = Reply(reward=cast("float", value))
    if isinstance(value, str) and not ends_conversation:
        value = Reply(value)
    if not all(hasattr(value, name) for name in ("messages", "reward", "done", "metrics")):
        raise InvalidReplyError(f"{method}() returned {_shown(value)}, expected {_EXPECTED[method]}")
    reward: Any = value.reward
    if not isinstance(reward, Real) or isinstance(reward, bool) or not _is_within(reward, _FLOAT32_MAX):
        raise InvalidReplyError(f"{method}() returned the reward {_shown(reward)}, expected a finite number")
    done = value.done.item() if hasattr(value.done, "item") else value.done  # a bool of numpy
    if not isinstance(done, bool):
        raise InvalidReplyError(f"{method}() returned done={_shown(value.done)}, expected True or False")
    if not isinstance(value.metrics, Mapping):
        raise InvalidReplyError(f"{method}() returned metrics={_shown(value.metrics)}, expected a mapping")
    metrics = {}  # True and False count as 1 and 0
    for name, number in value.metrics.items():
        if not isinstance(name, str) or not isinstance(number, Real) or not _is_within(number, sys.float_info.max):
            raise InvalidReplyError(
                f"{method}() returned the metric {_shown(name)}: {_shown(number)}, expected finite numbers by name"
            )
        metrics[name] = float(number)
    messages = "" if done else _bounded(private(_messages(value.messages, method)))
    return Reply(messages, float(reward), done, metrics)


def _is_within(number: Any, largest: float) -> bool:
    """Return whether a number, which may be an integer beyond all floats, is from ``-largest`` to ``largest``."""
    return bool(abs(number) <= largest)


def _messages(value: Any, method: str) -> str | list[Message]:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise InvalidReplyError(f"{method}() returned messages={_shown(value)}, expected a text or a list of messages")
    messages = []
    for message in value:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str | list):
            raise InvalidReplyError(
                f"{method}() returned the message {_shown(message)}, expected 'role', and text or parts in 'content'"
            )
        if message.get("role") not in ROLES:
            raise InvalidReplyError(
                f"{method}() returned a message of role {_shown(message.get('role'))}, expected one of {ROLES}: the "
                f"assistant's messages are the policy's"
            )
        further = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
        read = content if isinstance(content, str) else _parts(content, method)
        messages.append({"role": message["role"], "content": read, **further})
    return messages


def _parts(content: list[Any], method: str) -> str | list[dict[str, Any]]:
    """Return the parts of a message, whose images are read; one text if no part is an image."""
    pictures = [{"type": "image", "image": part} if is_picture(part) else part for part in content]
    try:
        parts = content_of(pictures)
    except BadRow as error:
        raise InvalidReplyError(f"{method}() returned content that cannot be read: {error}") from error
    if parts is None:
        raise InvalidReplyError(
            f"{method}() returned the content {_shown(content)}, expected a text, or a list of texts and images"
        )
    if isinstance(parts, str):
        return parts
    merged: list[dict[str, Any]] = []  # successive texts are one, in which special tokens are found
    for part in parts:
        if is_image(part):
            merged.append({**part, "image": _image(part["image"], method)})
        elif merged and not is_image(merged[-1]):
            merged[-1] = {**merged[-1], "text": merged[-1]["text"] + part["text"]}
        else:
            merged.append(part)
    return merged


def is_picture(value: Any) -> bool:
    """Return whether a value is an image itself, and not its path or its bytes."""
    return isinstance(value, EncodedImage | Image.Image)


def _image(value: Any, method: str) -> EncodedImage:
    """Read an image of a reply; no file or address, because a policy may have chosen it."""
    if isinstance(value, Mapping):
        value = value.get("url") or value.get("bytes")
    if not (is_picture(value) or isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:"))):
        raise InvalidReplyError(
            f"{method}() returned an image as {_shown(value)}, expected an image of Pillow, its bytes or a data: URL: "
            f"open files and addresses in the environment, where it is known which ones may be read, and convert "
            f"arrays by PIL.Image.fromarray"
        )
    try:
        return reader().read_image(value, _LIMITS, None)
    except BadImage as error:
        limits = f"at most {_LIMITS.max_pixels} pixels and {_LIMITS.max_bytes} bytes are allowed"
        raise InvalidReplyError(f"{method}() returned an image that cannot be used: {error.kind}; {limits}") from error


def _bounded(messages: str | list[Message]) -> str | list[Message]:
    """Cut messages whose texts are too long together, and replace characters that are not valid Unicode."""
    left = LARGEST_TEXT
    if isinstance(messages, str):
        return _unicode(messages[:left])

    def cut(text: str) -> str:
        nonlocal left
        text = _unicode(text[:left])
        left -= len(text)
        return text

    bounded = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = cut(content)
        else:
            content = [part if is_image(part) else {**part, "text": cut(part["text"])} for part in content]
        bounded.append({**message, "content": content})
    return bounded


def _unicode(text: str) -> str:
    """Replace surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."
