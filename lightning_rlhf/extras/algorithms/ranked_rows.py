"""Rankings: rows with several answers to a prompt, and their ranks or scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.data.answers import AnswersDataModule, MaskedText, sequences
from lightning_rlhf.data.columns import Fields, check_no_other_prompt
from lightning_rlhf.data.lengths import cut
from lightning_rlhf.data.messages import common_prefix, holds_messages, messages_of
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import RowReport
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.rankings import RankingBatch

# Keys of a text and its rank or score where each answer is an object: ours, Nectar, UltraFeedback and others.
_TEXTS = ("response", "answer", "completion", "text", "output", "generation")
_RANKS = ("rank",)
_SCORES = ("score", "overall_score", "rating", "reward")


class RankedTexts(NamedTuple):
    """The answers to a prompt, the best first.

    Args:
        texts: prompt with answer, tokenized, of at least two answers.
        ranks: rank of each, from 1 without gaps; equal ranks are a tie.
    """

    texts: list[MaskedText]
    ranks: list[int]


class RankingDataModule(AnswersDataModule):
    """Reads several ranked answers to a prompt, for reward models.

    The column ``responses`` (or ``completions``, ``answers``, ``generations``) has a list of at least two answers:
    texts, messages, or objects with a ``response`` (``answer``, ``completion``, ``text``). Beside it is a list
    ``ranks`` with 1 for the best, or ``scores`` (``ratings``), of which the highest is the best. Objects can have their
    own ``rank`` or ``score`` (``overall_score``, ``rating``) instead. Rows may have different numbers of answers.

    Equal ranks or scores are a tie: such answers are not compared with each other, and the rows are counted. A row
    whose answers are all tied is a bad row, as is one in which answers with the same tokens have different ranks.
    Without a ``prompt`` (or ``instruction``), each answer is a conversation, and the prompt is what all begin with.
    ``too_long: cut_end`` cuts the end of each text. The other cuts shorten the shared prompt.

    Args:
        answer_rank: key of each answer's rank, 1 for the best, such as ``rank``; dots separate nested keys. None finds
            a known one.
        answer_score: key of each answer's score, the highest for the best, such as ``fine-grained_score`` or
            ``annotations.helpfulness.Rating``. None finds a known one.
        **kwargs: arguments of :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    batch_type = RankingBatch
    field_candidates = (
        (("prompt", "prompt"), ("prompt", "instruction")),
        (
            ("responses", "responses"),
            ("responses", "completions"),
            ("responses", "answers"),
            ("responses", "generations"),
        ),
        (("ranks", "ranks"), ("scores", "scores"), ("scores", "ratings")),
    )

    def __init__(
        self, *args: Any, answer_rank: str | None = None, answer_score: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if answer_rank is not None and answer_score is not None:
            raise UsageError(
                f"answer_rank is {answer_rank!r} and answer_score {answer_score!r}, but answers are ordered by one of "
                f"them: set only one"
            )
        self.answer_rank, self.answer_score = answer_rank, answer_score
        self._read_keys: set[str] = set()  # of the objects of the current row

    def convert(self, fields: Fields) -> RankedTexts:
        """Tokenize all answers, and read their ranks."""
        answers = _listed(fields, "responses")
        if len(answers) < 2:
            raise BadRow(f"a ranking needs at least 2 answers, got {len(answers)}")
        self._read_keys = set()
        ranks = self._ranks(fields, answers)
        if len(set(ranks)) == 1:
            raise BadRow(f"all {len(ranks)} answers are tied, so that nothing can be learned", "all answers are tied")
        texts = self._fit_together(self._tokenized(fields, [self._content(answer) for answer in answers]))
        rank_of = dict[tuple[int, ...], int]()
        for text, rank in zip(texts, ranks, strict=True):
            other = rank_of.setdefault(tuple(text.ids), rank)
            if other != rank:
                raise BadRow(
                    f"answers of ranks {other} and {rank} have the same tokens",
                    "answers of different ranks have the same tokens",
                )
        if len(set(ranks)) < len(ranks):
            self.note("some answers to a prompt are tied: they are not compared with each other")
        best_first = sorted(range(len(ranks)), key=ranks.__getitem__)
        return RankedTexts([texts[i] for i in best_first], [ranks[i] for i in best_first])

    # -- ranks ------------------------------------------------------------------------------------------------

    def _ranks(self, fields: Fields, answers: Sequence[Any]) -> list[int]:
        """Return the rank of each answer, from 1 without gaps."""
        by_column = next((name for name in ("ranks", "scores") if name in fields), None)
        if by_column is not None:
            label, is_score = fields.names[by_column], by_column == "scores"
            values = _listed(fields, by_column)
            if len(values) != len(answers):
                raise BadRow(
                    f"column {label!r} has {len(values)} values for {len(answers)} answers",
                    f"column {label!r} has another number of values than there are answers",
                )
            if other := self.answer_rank or self.answer_score or next(iter(_known_keys(answers)), None):
                raise BadRow(
                    f"each answer has its {other!r}, but the column {label!r} ranks them, too; "
                    f"{fields.leave_out(by_column)}",
                    f"both the answers and the column {label!r} have ranks",
                )
        else:
            label, is_score = self._key(fields, answers)
            values = [_nested(answer, label) for answer in answers]
            self._read_keys.add(label.partition(".")[0])
        numbers = [_number(value, f"{label} of answer {number}") for number, value in enumerate(values, 1)]
        ordered = sorted(set(numbers), reverse=is_score)
        return [1 + ordered.index(number) for number in numbers]

    def _key(self, fields: Fields, answers: Sequence[Any]) -> tuple[str, bool]:
        """Return the key of each answer's rank or score, and whether it is a score."""
        chosen = self.answer_rank or self.answer_score
        if chosen is not None:
            return chosen, self.answer_score is not None
        known = _known_keys(answers)
        if not known:
            raise BadRow(
                f"the answers have no ranks: add a column ranks (1 is the best) or scores (the highest is the best), "
                f"or name the key in each answer by data.init_args.answer_rank or answer_score; the row has only "
                f"{sorted(map(str, fields.row))}",
                "the answers have no ranks",
            )
        if len(known) > 1:
            raise BadRow(
                f"answers have {' and '.join(known)}: choose one by data.init_args.answer_rank or answer_score",
                f"answers have {' and '.join(known)}",
            )
        return known[0], known[0] in _SCORES

    # -- texts ------------------------------------------------------------------------------------------------

    def _content(self, answer: Any) -> Any:
        """Return the text or the messages of an answer."""
        if not isinstance(answer, Mapping) or "role" in answer or "from" in answer:
            return [answer] if isinstance(answer, Mapping) else answer
        known = [name for name in _TEXTS if answer.get(name) is not None]
        if len(known) != 1:
            found = " and ".join(known) if known else f"only {sorted(map(str, answer))}"
            raise BadRow(
                f"an answer that is an object needs its text in one of {', '.join(_TEXTS)}, got {found}",
                "an answer has no text" if not known else "an answer has several texts",
            )
        self._read_keys.add(known[0])
        return answer[known[0]]

    def _tokenized(self, fields: Fields, answers: list[Any]) -> list[MaskedText]:
        """Tokenize each answer with the prompt of the row."""
        prompt = fields.get("prompt")
        answers = [self._as_messages(answer, has_prompt=prompt is not None) for answer in answers]
        are_messages = [holds_messages(answer) for answer in answers]
        if any(are_messages) and not all(are_messages):
            raise BadRow("some answers are messages and others are text")
        if all(are_messages):
            prompt, answers = self._split_conversations(fields, prompt, answers)
        elif prompt is None and self.split_after is not None:
            if len({self.split(str(answer))[0] for answer in answers}) > 1:
                raise BadRow("the answers belong to different prompts")
        elif prompt is None:
            check_no_other_prompt(fields, [""])
            raise BadRow("the row has no prompt, and its answers are no conversations", "no prompt")
        column = fields.names["responses"]
        return [
            self.mask_row(_with_answer(fields, prompt, f"{column}[{number}]", answer))
            for number, answer in enumerate(answers)
        ]

    def _as_messages(self, answer: Any, has_prompt: bool) -> Any:
        """Return an answer as messages if ``as_messages`` is set; without a marker, it is the assistant's message."""
        if self.text_messages is None or not isinstance(answer, str):
            return answer
        if not answer.strip():
            raise BadRow("an answer is empty")
        markers = [marker.strip() for marker in (self.text_messages.markers or {}).values()]
        if has_prompt and markers and not answer.lstrip().startswith(tuple(markers)):
            return [{"role": "assistant", "content": answer}]
        return self.text_messages("completion", answer)

    def _split_conversations(self, fields: Fields, prompt: Any, answers: list[Any]) -> tuple[Any, list[Any]]:
        """Return the messages of the prompt, and those of each answer without it."""
        conversations = [messages_of(answer, "answer", self.roles) for answer in answers]
        if prompt is None:
            prompt = reduce(lambda first, other: first[: common_prefix(first, other)], conversations)
            if not any(message["role"] == "user" for message in prompt):
                check_no_other_prompt(fields, [""])
                raise BadRow("the answers have no question in common, and the row has no prompt")
        elif not holds_messages(prompt):
            return prompt, answers
        start = messages_of(prompt, "prompt", self.roles)
        if all(messages[: len(start)] == start for messages in conversations):
            conversations = [messages[len(start) :] for messages in conversations]
        if not all(conversations):
            raise BadRow("an answer has no messages after the prompt")
        return prompt, conversations

    def _fit_together(self, texts: list[MaskedText]) -> list[MaskedText]:
        """Return the texts, cut to ``max_tokens``; all but ``cut_end`` cut the prompt of all texts by as much."""
        longest = max(text.longest for text in texts)
        excess = self.excess(longest, "a text", has_images=any(text.images for text in texts))
        if not excess or self.too_long == "cut_end" or any(text.starts for text in texts):
            return [self.fit_text(text, "a text") for text in texts]
        prompt = min(text.first_answer_token for text in texts)
        if excess >= prompt:
            raise BadRow(
                f"a text has {longest} tokens; cutting its prompt of {prompt} is not enough for {self.max_tokens}",
                "cutting the prompt is not enough",
            )
        self.count_cut("the prompt of a ranking")
        return [
            MaskedText([*cut(text.ids[:prompt], excess, self.too_long), *text.ids[prompt:]], text.loss_mask[excess:])
            for text in texts
        ]

    # -- reports and batches ----------------------------------------------------------------------------------

    def _convert_row(self, report: RowReport, row: Row) -> Any:
        example = super()._convert_row(report, row)
        answers = self.columns.find(row)["responses"]
        report.has_messages |= isinstance(answers, list) and any(
            isinstance(answer, list) or (isinstance(answer, Mapping) and "role" in answer) for answer in answers
        )
        return example

    def check_unread(self, fields: Fields) -> list[str]:
        """Return the columns of a row, and the keys of its answers, that nothing reads."""
        column = fields.names["responses"]
        objects = [answer for answer in _listed(fields, "responses") if isinstance(answer, Mapping)]
        keys = {key for answer in objects if "role" not in answer for key, value in answer.items() if value is not None}
        return [*super().check_unread(fields), *(f"{column}.{key}" for key in sorted(keys - self._read_keys))]

    def count_tokens(self, example: RankedTexts) -> int:
        """Count the tokens of all texts."""
        return sum(len(text.ids) for text in example.texts)

    def count_longest_text(self, example: RankedTexts) -> int:
        """Count the tokens of the longest text."""
        return max(text.longest for text in example.texts)

    def collate(
        self, examples: list[RankedTexts], numbers: list[int], positions: list[int], epoch: int
    ) -> RankingBatch:
        """Pad all texts on the right to the longest one, and rows to the largest number of answers."""
        ranks, _ = pad_right([example.ranks for example in examples])
        texts = sequences([text for example in examples for text in example.texts], self.image_store)
        return RankingBatch.of(texts, ranks)


def _listed(fields: Fields, name: str) -> list[Any]:
    """Return the list of a field; a text is read as JSON, as in CSV files."""
    value, column = fields[name], fields.names.get(name, name)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow(
                f"column {column!r} holds a text that is no JSON list", f"column {column!r} is no list"
            ) from None
    if isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray":
        value = value.tolist()
    if not isinstance(value, list | tuple):
        kind = "null" if value is None else type(value).__name__
        raise BadRow(f"column {column!r} holds {kind}, expected a list")
    return list(value)


def _with_answer(fields: Fields, prompt: Any, column: str, answer: Any) -> Fields:
    """Return the fields of a row with one of its answers as completion, in a column of this name."""
    names = {name: column for name, column in fields.names.items() if name not in ("responses", "ranks", "scores")}
    row = {**fields.row, column: answer}
    if "prompt" not in names and prompt is not None:
        row["prompt"], names["prompt"] = prompt, "prompt"
    return replace(fields, row=row, names={**names, "completion": column})


def _known_keys(answers: Sequence[Any]) -> list[str]:
    """Return the known keys of ranks and scores that answers have."""
    objects = [answer for answer in answers if isinstance(answer, Mapping)]
    return [key for key in (*_RANKS, *_SCORES) if any(answer.get(key) is not None for answer in objects)]


def _nested(answer: Any, key: str) -> Any:
    """Return the value of a key of an answer, whose dots separate nested keys; None without it."""
    if isinstance(answer, Mapping) and key in answer:
        return answer[key]
    for part in key.split("."):
        answer = answer.get(part) if isinstance(answer, Mapping) else None
    return answer


def _number(value: Any, label: str) -> float:
    """Return a finite number, also from a text such as those of UltraFeedback's ratings."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRow(f"{label} is {value!r}, expected a finite number", "an answer's rank or score is not a number")
    return number
