"""Bridges: the tokens between a sampled turn and the next one, for the messages that an environment wrote."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.image_parts import (
    MARKER,
    has_images,
    images_of,
    is_image,
    text_messages,
    text_of_content,
)
from lightning_rlhf.data.messages import Message
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.images import ImageProcessor

_SENTINEL = "SENTINEL0ANSWER"  # stands for an answer of the policy in a rendered conversation
_REPLY = "REPLY0OF0ENVIRONMENT"
_CUT = " ... "  # mark in a text whose middle was left out
_PROBE = {"role": "user", "content": "probe"}


class Bridge(ABC):
    """Conversion of an environment's messages to tokens.

    Texts of an environment, names and arguments of tool calls, and schemas of tools cannot contain special tokens: each
    is changed by a space after its first character.

    Args:
        max_message_tokens: tokens of one message; longer ones are cut in the middle. None does not cut.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_message_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_message_tokens = max_message_tokens
        self._images: ImageProcessor | None = None
        template = ""
        if isinstance(tokenizer.chat_template, str):
            template = tokenizer.chat_template
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        markers = {text for text, special in added.items() if (special or text in template) and text.strip()}
        self._markers = sorted({*markers, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)

    def read_images(self, processor: ImageProcessor, writes_images: bool = False) -> None:
        """Prepare for prompts with images.

        Args:
            writes_images: whether messages of the environment may have images, too.

        Raises:
            ValueError: the bridge does not allow messages with images.
        """
        self._images = processor
        self._markers = sorted({*self._markers, *processor.tokens_of_images}, key=len, reverse=True)
        if writes_images:
            self.check_images()

    @abstractmethod
    def check_images(self) -> None:
        """Validate that the bridge allows messages of the environment with images.

        Raises:
            ValueError: it does not.
        """

    def expand(self, text: str, images: Sequence[EncodedImage]) -> str:
        """Return a text whose placeholders are replaced by what stands for their images; without images, the text."""
        if self._images is None or not images:
            return text
        return self._images.expand(text, images)

    @abstractmethod
    def prompt(
        self, text: str, messages: Sequence[Message], written: Sequence[Message], expanded: bool = True
    ) -> list[int]:
        """Return the tokens of a prompt with messages that an environment appended to it.

        Args:
            text: prompt as text, with one placeholder for each image.
            messages: prompt as messages; empty for plain text.
            written: messages of the environment, at least one.
            expanded: whether the tokens contain those that stand for each image, and not one placeholder.
        """

    @abstractmethod
    def between(
        self, turn: Sequence[int], written: Sequence[Message], before: Sequence[int] = (), expanded: bool = True
    ) -> list[int] | None:
        """Return the tokens between a turn and the next one; None if no turn can follow this one.

        Args:
            turn: tokens of the turn.
            written: messages of the environment, at least one.
            before: all tokens before the turn.
            expanded: whether the tokens contain those that stand for each image, and not one placeholder.
        """

    @abstractmethod
    def check(self) -> None:
        """Validate that the tokenizer allows this bridge, before a model is loaded.

        Raises:
            ValueError: it does not.
        """

    def ids(self, text: str) -> list[int]:
        """Tokenize a text without special tokens at its ends."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def safe(self, message: Message) -> Message:
        """Return a message whose texts are not too long, and which contains no special token; its images stay."""
        content, limit = message["content"], self.max_message_tokens
        if limit is not None and isinstance(content, str):
            content = self._cut(content, limit)
        elif limit is not None:
            texts = [part for part in content if not is_image(part)]
            limit = max(1, limit // max(1, len(texts)))
            content = [part if is_image(part) else {**part, "text": self._cut(part["text"], limit)} for part in content]
        parts = {**message, "content": content}
        return {name: part if name == "role" else self.without_markers(part) for name, part in parts.items()}

    def _cut(self, text: str, limit: int) -> str:
        """Return a text of at most ``limit`` tokens, whose middle may be left out."""
        if len(text) <= limit:
            return text
        # A token has a bounded number of characters in practice; this only avoids work on very long texts.
        if len(text) > 64 * limit:
            text = f"{text[: 32 * limit]}{text[-32 * limit :]}"
        ids = self.ids(text)
        if len(ids) <= limit:
            return text
        space = max(0, limit - len(self.ids(_CUT)))
        ends = [self.tokenizer.decode(part) for part in (ids[: (space + 1) // 2], ids[len(ids) - space // 2 :])]
        return _CUT.join(str(end) for end in ends)

    def without_markers(self, value: Any) -> Any:
        """Return a text without special tokens, or a JSON value without them in its texts and keys."""
        if isinstance(value, str):
            return self._text_without_markers(value)
        if isinstance(value, Mapping):
            return {self.without_markers(key): self.without_markers(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.without_markers(part) for part in value]
        return value

    def _text_without_markers(self, text: str) -> str:
        """Insert a space into every special token in a text; leave out those of one character."""
        while present := [marker for marker in self._markers if marker in text]:
            first, rest = present[0][:1], present[0][1:]
            text = text.replace(present[0], f"{first} {rest}" if rest else "")
        return text


class PlainBridge(Bridge):
    """Texts alone, without a chat template, for models that were trained on such texts.

    Args:
        max_message_tokens: argument of :class:`Bridge`.
    """

    @override
    def prompt(
        self, text: str, messages: Sequence[Message], written: Sequence[Message], expanded: bool = True
    ) -> list[int]:
        if expanded:
            text = self.expand(text, images_of(messages))
        return self.ids(text) + self.between([], written, expanded=expanded)

    @override
    def between(
        self, turn: Sequence[int], written: Sequence[Message], before: Sequence[int] = (), expanded: bool = True
    ) -> list[int]:
        ids: list[int] = []
        for message in map(self.safe, written):
            text = text_of_content(message["content"], self._images.placeholder if self._images else MARKER)
            ids += self.ids(self.expand(text, images_of([message])) if expanded else text)
        return ids

    def check_images(self) -> None:
        """Accept images: a placeholder stands for each."""

    def check(self) -> None:
        """Accept every tokenizer."""


class TemplateBridge(Bridge):
    """The chat template's text after an answer: it is rendered with a made-up answer, and cut after it.

    This does not need a template that renders a prefix of a conversation as a prefix of its text: many templates
    change earlier turns when more messages follow, but few change the text after them, and :meth:`check` finds those.

    Args:
        tokenizer: tokenizer with a chat template.
        max_message_tokens: argument of :class:`Bridge`.
        tools: JSON schemas of the tools.
        options: variables of the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_message_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, max_message_tokens)
        self._chat = Chat(tokenizer, self.without_markers(list(tools)) or None, dict(options or {}))
        self._expected_roles = ("user", "tool") if tools else ("user",)
        self._checked_roles: set[str] = set()
        self._roles_with_images: set[str] = set()
        self._special_ids = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}

    @override
    def prompt(
        self, text: str, messages: Sequence[Message], written: Sequence[Message], expanded: bool = True
    ) -> list[int]:
        chat = replace(self._chat, expand=self.expand)
        safe = [self._checked(message) for message in written]
        return self.ids(chat.render([*messages, *safe], "prompt", generation=True, expanded=expanded))

    def conversation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens of a whole conversation of an agent, whose next turn is the policy's.

        Args:
            messages: messages of all roles; texts of the assistant are tokenized again.
            tools: JSON schemas of the tools; empty uses those of the bridge.
        """
        chat = replace(self._chat, tools=self.without_markers(list(tools))) if tools else self._chat
        return self.ids(chat.render([self.safe(message) for message in messages], "conversation", generation=True))

    @override
    def between(
        self, turn: Sequence[int], written: Sequence[Message], before: Sequence[int] = (), expanded: bool = True
    ) -> list[int] | None:
        """Tokens at the end of an answer are left out if the policy sampled them."""
        for message in written:
            self._check_role(message["role"])  # roles that check() did not expect
        text = self._text_after([_PROBE], [self._checked(message) for message in written])
        ids = self.ids(self.expand(text, images_of(written)) if expanded else text)
        pairs = zip(ids, self._end_of_answer, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        ends = [i for i in range(max(1, shared)) if list(turn[-1:]) == ids[i : i + 1]]
        is_end = ends and (ends[0] == 0 or turn[-1] in self._special_ids)  # not a line break after the end token
        return ids[ends[0] + 1 :] if is_end else ids

    @cached_property
    def _end_of_answer(self) -> list[int]:
        """Tokens of the template after the last answer of a conversation: end tokens, and perhaps a line break."""
        text = self._chat.render([_PROBE, {"role": "assistant", "content": _SENTINEL}], "conversation")
        return self.ids(text.rpartition(_SENTINEL)[2])

    def check(self) -> None:
        """Validate the template.

        Raises:
            ValueError: there is no template, it rejects the messages, or its text after an answer depends on the
                messages before it; the message shows both texts.
        """
        self._check_template()
        for role in self._expected_roles:
            self._check_role(role)

    def check_images(self) -> None:
        """Validate that the template renders the images of tools, or of users where the environment has no tools.

        Raises:
            ValueError: it renders none, or another number.
        """
        self._check_images_of(self._expected_roles[-1])

    def _checked(self, message: Message) -> Message:
        """Return a message with safe texts, after a check that the template renders its images."""
        if has_images(message["content"]):
            self._check_images_of(message["role"])
        return self.safe(message)

    def _check_images_of(self, role: str) -> None:
        """Validate that the template renders a message with an image and a text."""
        if role in self._roles_with_images or self._images is None:
            return
        written = {"role": role, "content": [{"type": "image", "image": None}, {"type": "text", "text": _REPLY}]}
        text = self._text_after([_PROBE], [written])
        counts = [text.count(part) for part in (self._images.placeholder, _REPLY)]
        if counts != [1, 1]:
            raise UsageError(
                f"the chat template renders a message of role {role!r} with an image and a text as {counts[0]} images "
                f"and {counts[1]} texts, so such messages cannot have images: use another role or template, or set "
                f"bridge: plain"
            )
        self._roles_with_images.add(role)

    def _check_template(self) -> None:
        if self.tokenizer.chat_template is None:
            raise UsageError(
                "the environment writes messages, but the tokenizer has no chat template: use one with a template, or "
                "set bridge: plain for a model that was trained on texts without a template"
            )

    def _check_role(self, role: str) -> None:
        """Validate the text after an answer for messages of a role."""
        if role in self._checked_roles:
            return
        answer = {"role": "assistant", "content": "second"}
        written = [{"role": role, "content": _REPLY}]
        short_text = self._text_after([_PROBE], written)
        for after in ([_PROBE], [{"role": role, "content": "third"}]):
            long_text = self._text_after([{"role": "user", "content": "first"}, answer, *after], written)
            if short_text != long_text:
                raise UsageError(
                    f"the chat template renders the text after an answer differently when more messages precede it, "
                    f"so the tokens of a conversation cannot be continued: {short_text!r} with one message before, "
                    f"{long_text!r} with three. Use another chat template, or set bridge: plain"
                )
        if short_text.count(_REPLY) != 1:
            raise UsageError(
                f"the chat template renders a message of role {role!r} {short_text.count(_REPLY)} times, expected "
                f"once: the text after an answer is {short_text!r}. Use another template, or set bridge: plain"
            )
        self._checked_roles.add(role)

    def _text_after(self, history: Sequence[Message], written: Sequence[Message]) -> str:
        """Return the text of the template after an answer, with the messages of the environment.

        The made-up answer has no tool calls, because the policy's own turn contains them.
        """
        sentinel = _SENTINEL
        while sentinel in json.dumps(text_messages([*history, *written])):
            sentinel += "0"
        answer: Message = {"role": "assistant", "content": sentinel}
        try:
            text = self._chat.render([*history, answer, *written], "conversation", generation=True)
        except BadRow as error:
            raise UsageError(
                f"{error}, in a conversation of an answer and a message of role {written[0]['role']!r}; use a template "
                f"that has this role, or set bridge: plain"
            ) from error
        if text.count(sentinel) != 1:
            raise UsageError(
                f"the chat template renders an answer {text.count(sentinel)} times, expected once, so the text after "
                f"it is not known: use another chat template, or set bridge: plain"
            )
        return text.split(sentinel)[1]
