"""Prompts for rollouts."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.chat import Message, chat_of, common_prefix, holds_messages, messages_of
from lightning_rlhf.data.columns import ABOUT, PROMPT, Fields
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.types import PromptBatch


class Prompt(NamedTuple):
    """A prompt.

    Args:
        text: after the chat template, if it was made of messages.
        ids: of its tokens.
        columns: further columns, for rewards.
        messages: it was made of, if any.
    """

    text: str
    ids: list[int]
    columns: dict[str, Any]
    messages: list[Message]


class PromptDataModule(RowsDataModule):
    """Rows with a ``prompt`` (text or messages), or a conversation whose last answer is left away.

    All further columns reach the reward functions. What is known to hold the right answer, the source or other
    information is also given as ``ground_truth``, ``data_source`` and ``extra_info``. Preference data serve as prompts:
    without a prompt column, that is the front part of the ``chosen`` text by ``split_after``, or the messages that
    ``chosen`` and ``rejected`` share. ``max_tokens`` limits the prompt.
    See :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    gives = PromptBatch
    questions = (PROMPT, (("chosen", "chosen"),), *ABOUT)

    def convert(self, fields: Fields) -> Prompt:
        """Text, token ids, further columns, messages."""
        text, messages = self._prompt(fields)
        whole = self.ids(text)
        ids = self.fit(whole, "the prompt")
        text = text if ids is whole else str(self.tokenizer.decode(ids))
        return Prompt(text, ids, self.columns.rest(fields, but=("prompt", "messages")), messages)

    def _prompt(self, fields: Fields) -> tuple[str, list[Message]]:
        if "messages" in fields:
            messages = messages_of(fields["messages"], "conversation")
        elif "prompt" not in fields and "chosen" in fields and holds_messages(fields["chosen"]):
            messages = messages_of(fields["chosen"], "chosen answer")
            if "rejected" in fields.row:
                messages = messages[: common_prefix(messages, messages_of(fields["rejected"], "rejected answer"))]
        elif "prompt" not in fields and self.split_after is not None:
            return self.split(fields.text("chosen"))[0], []
        else:
            return self.prompt_of(fields)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise BadRow("the conversation begins with an assistant: there is no prompt")
        chat = chat_of(self.tokenizer, fields, self.chat_template_kwargs)
        return chat.render(messages, "prompt", generation=True), messages

    @cached_property
    def column_names(self) -> list[str]:
        """Of all rows, so that what a reward function is given does not depend on which rows are in its batch."""
        return sorted({name for examples in self.examples.values() for example in examples for name in example.columns})

    def tokens(self, example: Prompt) -> int:
        """Of the prompt."""
        return len(example.ids)

    def collate(self, examples: list[Prompt], numbers: list[int], places: list[int], epoch: int) -> PromptBatch:
        """Token ids stay lists: the engine pads as it likes."""
        texts, ids, rests, messages = (list(part) for part in zip(*examples, strict=True))
        columns = {name: [rest.get(name) for rest in rests] for name in self.column_names}
        talks = messages if any(messages) else []
        return PromptBatch(list(numbers), ids, texts, columns, epoch, list(places), talks)
