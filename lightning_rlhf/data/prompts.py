"""Prompts for rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from lightning_rlhf.data.base import PromptText, RowsDataModule
from lightning_rlhf.data.columns import PROMPT, REWARD_FIELDS, Fields, source_of
from lightning_rlhf.data.image_parts import MARKER
from lightning_rlhf.data.messages import common_prefix, holds_messages
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.images import BadImage
from lightning_rlhf.types import Prompt, PromptBatch, PromptImages

_ANSWERS = 1000  # answers whose lengths are compared with the limit of responses


def correct_answer(columns: Mapping[str, Any]) -> str | None:
    """Return the correct answer of a row if it is a text or a number, else None."""
    answer = columns.get("ground_truth")
    return str(answer) if isinstance(answer, str | int | float) else None


class PromptDataModule(RowsDataModule):
    """Reads rows with a ``prompt`` (text or messages), or with a conversation, and then removes its last answer.

    Use it for RL and distillation, where the policy writes the answers. All further columns are passed to your reward
    functions. If a column is known to contain the correct answer, the source or other information, it is also passed as
    ``ground_truth``, ``data_source`` or ``extra_info``, and the images of a prompt as ``images``.

    You can also use preference data without a prompt column. The prompt is then the part of the ``chosen`` text up to
    ``split_after``, or the messages that ``chosen`` and ``rejected`` share. ``max_tokens`` limits the prompt.

    If the chat template's own system message is longer than the user's last message, an empty one in your rows,
    ``{"role": "system", "content": ""}``, saves more than half of the tokens. For the arguments, see
    :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    batch_type = PromptBatch
    field_candidates = (PROMPT, (("chosen", "chosen"),), *REWARD_FIELDS)

    def convert(self, fields: Fields) -> Prompt:
        """Tokenize the prompt and collect the columns for rewards."""
        prompt = self._prompt(fields)
        text = prompt.text
        all_ids = self.tokenize(text)
        ids = self.within_limit(all_ids, "the prompt", has_images=bool(prompt.images))
        text = text if ids is all_ids else str(self.tokenizer.decode(ids))
        columns = self.columns.other_columns(fields, exclude=("prompt", "messages", "images"))
        if not prompt.images:
            return Prompt(ids, text, columns, prompt.messages, prompt.tools)
        images = PromptImages(
            tuple(prompt.images), self.number_images(prompt.images), tuple(self.tokenize(prompt.unexpanded))
        )
        text = prompt.unexpanded.replace(self._store.processor.placeholder, MARKER)
        columns["images"] = prompt.images
        return Prompt(ids, text, columns, prompt.messages, prompt.tools, images=images)

    def check_unread(self, fields: Fields) -> list[str]:
        """Return the columns of a row that no field reads; rewards and environments can still read them."""
        self.lost_columns |= set(fields.lost) - self.columns.left_out
        return fields.unread

    @cached_property
    def lost_columns(self) -> set[str]:
        """Columns that are part of the text in other libraries, and that no field reads."""
        return set()

    def _prompt(self, fields: Fields) -> PromptText:
        if "messages" in fields:
            messages = self.messages(fields, "messages", "conversation")
        elif "prompt" not in fields and "chosen" in fields and holds_messages(fields["chosen"]):
            messages = self.messages(fields, "chosen", "chosen answer")
            if "rejected" in fields.row:
                rejected = self.messages(fields, "rejected", "rejected answer")
                messages = messages[: common_prefix(messages, rejected)]
        elif "prompt" not in fields and self.split_after is not None:
            self.check_plain_text(fields)
            text = self.split(fields.text("chosen"))[0]
            return PromptText(text, text)
        else:
            return self.prompt_of(fields)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise BadRow("the conversation begins with an assistant message, so it has no prompt")
        return self.prompt_of_messages(fields, messages)

    @cached_property
    def column_names(self) -> list[str]:
        """Union of the columns of all rows, so that a reward function receives the same arguments in every batch."""
        return sorted({name for examples in self.examples.values() for example in examples for name in example.columns})

    @cached_property
    def source_names(self) -> list[str]:
        """Values of the column ``source`` or ``data_source`` in all rows, in alphabetical order."""
        rows = (example.columns for examples in self.examples.values() for example in examples)
        return sorted({name for name in map(source_of, rows) if name is not None})

    def answer_lengths(self, part: str, most: int | None = None) -> list[int]:
        """Return the numbers of tokens of the correct answers that are texts or numbers, without the end token.

        Args:
            part: part of the data, such as ``train``.
            most: largest number of rows that are read; None reads all.
        """
        answers = (correct_answer(row.columns) for row in self.examples.get(part, ())[:most])
        texts = (answer.encode(errors="replace").decode() for answer in answers if answer is not None)
        return [len(self.tokenize(text)) for text in texts]

    def length_warning(self, max_response_tokens: int) -> str:
        """Return a warning if correct answers have more tokens than a response may have.

        Args:
            max_response_tokens: longest response; its end token counts.
        """
        lengths = self.answer_lengths("train", most=_ANSWERS)
        if not any(length >= max_response_tokens for length in lengths):
            return ""
        longer = sum(length >= max_response_tokens for length in lengths)
        return (
            f"{longer} of {len(lengths)} correct answers do not fit into max_response_tokens {max_response_tokens}: "
            f"the longest has {max(lengths) + 1} tokens with its end token. Raise max_response_tokens of RolloutLoop"
        )

    def end_token_remedy(self, end: int) -> str:
        """Return what makes responses end at a token."""
        return f"set stop_token_ids: [{end}] in RolloutLoop, or another eos_token in the tokenizer"

    def use_further_images(self, most: int) -> None:
        """Prepare for images that are not in the data, such as those in replies of an environment.

        Args:
            most: largest number of such images of a text.

        Raises:
            ValueError: there is no processor of a vision-language model, or a prompt has the placeholder of an image.
        """
        if self.image_store is None:
            self._unchecked = False
            processor = self._store.processor
            for example in (example for examples in self.examples.values() for example in examples):
                try:
                    processor.expand(example.text, ())
                except BadImage as error:
                    raise UsageError(f"the environment has max_images, and a prompt: {error}") from error
        self._store.further = most

    def count_tokens(self, example: Prompt) -> int:
        """Count the tokens of the prompt."""
        return len(example.token_ids)

    def collate(self, examples: list[Prompt], numbers: list[int], positions: list[int], epoch: int) -> PromptBatch:
        """Collect prompts in a batch; each has all columns of the data, so that every batch has the same."""
        of_source: dict[str | None, int] = {name: number for number, name in enumerate(self.source_names)}
        prompts = [
            replace(
                example,
                columns={name: example.columns.get(name) for name in self.column_names},
                images=None if self.image_store is None else _padded(example, self.image_store.longest),
                index=number,
                position=position,
                source=of_source.get(source_of(example.columns), -1) if of_source else None,
            )
            for example, number, position in zip(examples, numbers, positions or range(len(numbers)), strict=True)
        ]
        return PromptBatch(prompts, epoch)


def _padded(prompt: Prompt, width: int) -> PromptImages:
    """Return the images of a prompt, with their numbers padded to the largest number of images of a text."""
    images = prompt.images or PromptImages((), (), tuple(prompt.token_ids))
    return replace(images, numbers=(*images.numbers, *[-1] * (width - len(images.numbers))))
