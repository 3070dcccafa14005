"""Texts of a conversation with the mask of the assistant's tokens: one text, or one for each turn to learn.

A conversation is one text if each turn stands in it exactly behind what the engine would be asked to continue.
Templates of models with thoughts render earlier turns differently when more messages follow; then each turn is a text
of its own, behind the rendered prompt of that turn.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_rlhf.data.chat import OPENS_THOUGHTS, Chat, begins_within_thoughts
from lightning_rlhf.data.completeness import Header, check_complete, header_of, left_out
from lightning_rlhf.data.image_parts import images_of
from lightning_rlhf.data.messages import THOUGHTS, Message, common_prefix, is_learned, without_flags
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.expected_errors import UsageError

TokenizedText = tuple[list[int], list[bool]]  # token ids, and a mask of those to learn
_OPEN_THOUGHTS = re.compile(r"(<(?![/|])[^<>|]*>|<\|[^<>]*(?<!\|)>[a-z]*|\[(?!/)[A-Z]+\])\s*$")


def tokenize_turns(
    chat: Chat, messages: Sequence[Message], label: str, first: int = 0
) -> tuple[list[TokenizedText], list[str]]:
    """Tokenize a conversation up to the last turn to learn, with masks of the turns' tokens.

    ``{% generation %}`` marks in the template define the turns. Without them, the conversation is rendered up to
    each turn and before it; the difference is the turn. The mask ends with the end token of a turn.

    Args:
        chat: chat template.
        messages: messages, at least one of them the assistant's.
        label: name of the messages in error messages.
        first: index of the first message that the mask may cover.

    Returns:
        One text, or one for each turn if the template renders earlier turns differently when more messages follow; and
        sentences about what the template leaves out on purpose.

    Raises:
        BadRow: no assistant message to learn, or the template rejects the messages or leaves out a part of them.
    """
    turns = [i for i, message in enumerate(messages) if is_learned(message) and i >= first]
    if not turns:
        unlearned = any(message["role"] == "assistant" for message in messages[first:])
        reason = "; each has a flag that says not to learn it" if unlearned else ""
        raise BadRow(f"the {label} has no assistant message to learn{reason}")
    for turn in turns:
        if not _has_words(messages[turn]):
            raise BadRow(
                f"message {turn} of the {label}, an answer to learn, is empty", "an answer of the assistant is empty"
            )
        if THOUGHTS in messages[turn] and OPENS_THOUGHTS.match(str(messages[turn]["content"]).lstrip()):
            raise BadRow(
                f"message {turn} of the {label} has thoughts twice, in {THOUGHTS} and at the beginning of its content: "
                f"remove one of them",
                "an answer has thoughts twice",
            )
    messages = without_flags(messages)
    rows = _Conversation(chat, messages, label)
    forgets = any(part.kind == "thoughts" and part.message in turns for part in left_out(chat, messages))
    whole = None if forgets else rows.one_text(turns, first)
    if whole is not None:
        return [whole], check_complete(chat, messages[: turns[-1] + 1], label, turns)
    texts, notes = [], dict[str, None]()
    for turn in turns:
        text, found = rows.text_of_turn(turn)
        texts.append(text)
        notes.update(dict.fromkeys(found))
    if len(texts) > 1:
        notes["the chat template writes earlier answers otherwise, so each answer is a text behind its own prompt"] = (
            None
        )
    return texts, list(notes)


def _has_words(message: Message) -> bool:
    """Return whether a message has a text, calls or images."""
    content = message["content"]
    return bool(message.get("tool_calls") or (content.strip() if isinstance(content, str) else content))


def _begins_with(ids: Sequence[int], ends: Sequence[int]) -> bool:
    """Return whether the first token is one of the end tokens."""
    return bool(ids) and ids[0] in ends


@dataclass(frozen=True)
class _Conversation:
    """A conversation and its chat template.

    Args:
        chat: chat template.
        messages: messages without flags.
        label: name of the messages in error messages.
    """

    chat: Chat
    messages: Sequence[Message]
    label: str

    def one_text(self, turns: Sequence[int], first: int) -> TokenizedText | None:
        """Return the conversation as one text; None if its turns are not what the engine would be asked for."""
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant" and i >= first]
        # The marks are positions in the text before images are expanded.
        if not self.chat.has_generation_marks or images_of(self.messages) or list(turns) != answers:
            return self._by_prefixes(turns)
        for turn in filter(None, turns):
            header = header_of(self.chat, self.messages, turn)
            if header is not None and header.thinks:
                self._check_open(self._prompt(turn), header, turn)
        arguments = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoding = self.chat.apply(self.messages, self.label, **arguments)
        ids, mask = list(encoding["input_ids"]), [bool(value) for value in encoding["assistant_masks"]]
        mask = self._without_text_behind_ends(ids, mask)
        if first:
            before = self.chat.render(self.messages[:first], self.label)
            if not self.chat.render(self.messages, self.label).startswith(before):
                return None
            start = len(self.chat.ids(before))
            mask = [value and i >= start for i, value in enumerate(mask)]
        return self._end_after_answer(ids, mask)

    def _without_text_behind_ends(self, ids: list[int], mask: list[bool]) -> list[bool]:
        """Remove the tokens after a turn's end token from the mask, because a model never generates them."""
        result: list[bool] = []
        for marked, part in itertools.groupby(zip(mask, ids, strict=True), key=operator.itemgetter(0)):
            run = [token for _, token in part]
            ends = [i for i, token in enumerate(run) if token in self.chat.ends]
            result += [marked and (not ends or i <= ends[-1]) for i in range(len(run))]
        return result

    def _by_prefixes(self, turns: Sequence[int]) -> TokenizedText | None:
        """Locate the turns by the renderings up to each turn and before it; None if these are no prefixes."""
        text = self.chat.render(self.messages, self.label)
        spans = []
        for turn in turns:
            before, after = self._prompt(turn), self.chat.render(self.messages[: turn + 1], self.label)
            if not (text.startswith(after) and after.startswith(before)):
                return None
            spans.append((len(before), len(after)))
        return self._tokenize(text, spans)

    def _prompt(self, turn: int) -> str:
        """Return the text that the engine would be asked to continue with a turn."""
        if turn:
            return self.chat.render(self.messages[:turn], self.label, generation=True)
        return self._text_before_first_answer()

    def _text_before_first_answer(self) -> str:
        """Return the text that the template renders before a conversation's first message, if it is the assistant's."""
        alone = self.chat.render(self.messages[:1], self.label)
        with_prompt = self.chat.render(self.messages[:1], self.label, generation=True)
        header = with_prompt.removeprefix(alone)
        if header in alone:
            return alone[: alone.index(header) + len(header)]
        return with_prompt

    def text_of_turn(self, turn: int) -> tuple[TokenizedText, list[str]]:
        """Return the prompt of a turn and the turn as one text; and sentences about what the template leaves out.

        Raises:
            BadRow: the answer cannot be located in its rendering, or a part of it would be lost.
        """
        prompt, rendered = self._prompt(turn), self.chat.render(self.messages[: turn + 1], self.label)
        notes = check_complete(self.chat, self.messages[:turn], self.label, generation=True) if turn else []
        answer = self._answer_with_thoughts(prompt, turn)
        if answer is None:
            notes += check_complete(self.chat, self.messages[: turn + 1], self.label, [turn])
            answer = rendered[self._start_of_answer(prompt, rendered, turn) :]
        text = self._tokenize(prompt + answer, [(len(prompt), len(prompt + answer))])
        return text, notes

    def _start_of_answer(self, prompt: str, rendered: str, turn: int) -> int:
        """Return the position in a rendered conversation of what the model is to generate behind the prompt."""
        same = common_prefix(prompt, rendered)
        if not prompt[same:].strip():  # nothing, or a line break less than behind <think> of the prompt
            return same
        header = header_of(self.chat, self.messages, turn) if turn else None
        if header is None or not rendered.startswith(header.before):
            raise self._not_located(turn)
        if prompt.startswith(header.before):  # the prompt has more, such as empty thoughts
            self._check_open(prompt, header, turn)
            opened = prompt[len(header.before) :]
            if _OPEN_THOUGHTS.search(opened):
                raise BadRow(
                    f"the chat template begins the thoughts of an answer ({opened.strip()!r}) in the prompt, and "
                    f"message {turn} of the {self.label} has none: write them before the answer, with their tags "
                    f"(nothing between the tags for an answer without thoughts), or set the template's option under "
                    f"data.init_args.chat_template_kwargs, such as enable_thinking: false",
                    "the chat template begins the thoughts of an answer, and the answer has none",
                )
            return len(header.before)
        added = prompt.removeprefix(self.chat.render(self.messages[:turn], self.label)) if turn else ""
        place = header.before.rfind(added) if added.strip() and added != prompt else -1
        if place < 0:
            raise self._not_located(turn)
        return place + len(added)

    def _check_open(self, prompt: str, header: Header, turn: int) -> None:
        """Check that a prompt does not close the thoughts with which its answer begins.

        Raises:
            BadRow: it does.
        """
        closed = prompt.removeprefix(header.before) if prompt.startswith(header.before) else ""
        if header.thinks and closed.strip():
            raise BadRow(
                f"message {turn} of the {self.label} has thoughts, and the chat template closes the thoughts in the "
                f"prompt ({closed.strip()!r}): remove them from the row, or set the template's option under "
                f"data.init_args.chat_template_kwargs, such as enable_thinking: true",
                "an answer has thoughts, which the chat template closes in the prompt",
            )

    def _answer_with_thoughts(self, prompt: str, turn: int) -> str | None:
        """Return an answer as it is written, whose thoughts the template would leave out; None for other answers.

        Some templates remove the thoughts from all answers, also from the last, and DeepSeek R1's begins them in the
        prompt. The model generates them nevertheless, so the answer is the content itself, behind the prompt.
        """
        content, opening = self.messages[turn]["content"], _OPEN_THOUGHTS.search(prompt)
        if not isinstance(content, str):
            return None
        lost = [part for part in left_out(self.chat, self.messages[: turn + 1]) if part.message == turn]
        begins = opening is not None and content.lstrip().startswith(opening[1])
        continues = opening is not None and not begins and begins_within_thoughts(content)
        header = header_of(self.chat, self.messages, turn) if lost or begins or continues else None
        if header is None or THOUGHTS in self.messages[turn] or any(part.kind != "thoughts" for part in lost):
            return None
        if begins and opening is not None and not header.before.endswith(opening[0]):
            content = content.lstrip().removeprefix(opening[1])
            return (content.lstrip("\n") if opening[0].endswith("\n") else content).rstrip() + header.after
        if continues and lost:
            return content.strip() + header.after
        return content.strip() + header.after if lost and header.before == prompt else None

    def _tokenize(self, text: str, spans: Sequence[tuple[int, int]]) -> TokenizedText:
        """Tokenize a text; the mask covers the tokens within some spans of it, up to the last end token of each."""
        tokenizer = self.chat.tokenizer
        if not tokenizer.is_fast:
            raise UsageError("conversations need a fast tokenizer, or a chat template with {% generation %} marks")
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
        mask = [False] * len(ids)
        for begin, end in spans:
            inside = [i for i, (start, stop) in enumerate(offsets) if start < end and stop > begin]
            ends = [i for i in inside if ids[i] in self.chat.ends]
            for i in inside:
                mask[i] = i <= (ends or inside)[-1]
            if inside and not ends and _begins_with(ids[inside[-1] + 1 :], self.chat.ends):
                mask[inside[-1] + 1] = True  # the template does not end a last message
        return self._end_after_answer(ids, mask)

    def _end_after_answer(self, ids: list[int], mask: list[bool]) -> TokenizedText:
        """Remove the tokens after the last answer, and append an end token if it is missing."""
        if not any(mask[1:]):
            raise BadRow(f"the chat template does not render the assistant's messages of the {self.label}")
        end = len(mask) - mask[::-1].index(True)
        begin = end - 1
        while begin and mask[begin - 1]:
            begin -= 1
        ends = [i for i in range(begin, end) if ids[i] in self.chat.ends]
        if ends:
            end = ends[-1] + 1
        elif _begins_with(ids[end:], self.chat.ends):
            end += 1
        else:
            return [*ids[:end], self.chat.ends[0]], [False, *mask[1:end], True]
        return ids[:end], [False, *mask[1:end]]

    def _not_located(self, turn: int) -> BadRow:
        return BadRow(
            f"the chat template renders message {turn} of the {self.label} differently in the prompt of a generation, "
            f"so the assistant's tokens cannot be located; use a template with {{% generation %}} marks",
            "the assistant's tokens cannot be located in what the chat template renders",
        )
