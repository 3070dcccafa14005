"""A reward from judges that rank the responses to a prompt."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, ClassVar, Literal

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.extras.judges.agreement import krippendorff_alpha
from lightning_rlhf.extras.judges.asking import Judge, Question, askers_of
from lightning_rlhf.extras.judges.endpoint import BudgetSpent
from lightning_rlhf.extras.judges.shown import DATA, Shown, marked, request_text, shown_rows
from lightning_rlhf.ranges import check_ranges

log = logging.getLogger(__name__)
QUESTION = "Which response is best: correct first, then following the request, then clear?"
_ASK = """{question}
Rank the responses {labels}. Their order above and their length mean nothing. Give your reason in one or two sentences,
then all labels, the best response first. End your answer with one JSON object of this form:
{{"reason": "...", "ranking": ["...", "..."]}}"""
_Log = Callable[[str, float], None]


class RankingReward:
    """Ranks the responses to each prompt; the best gets 1, the last 0, and the others are spaced equally between.

    Use it where responses are easier to compare than to grade. The judge sees all responses to a prompt at once, so its
    context must be long enough for them. Equal responses get the same reward. A prompt with one response, as in greedy
    validation, has nothing to rank, so the response gets no reward.

    Judges prefer some positions. Each judge therefore ranks the responses in several orders, which depend on the texts
    and not on the order of sampling: the second is the reverse of the first. The reward is the mean over judges and
    orders. ``reward_<reward>/agreement`` is Krippendorff's alpha of these rankings, mean over prompts: near or below 0,
    the judge ranks by chance or by position.

    Args:
        judges: one or several judges with different names.
        question: what the ranking is about.
        orders: number of orders in which each judge sees the responses.
        shows_answer: whether the judge sees the correct answer of the row, from the column ``ground_truth``.
        max_unranked: largest fraction of a rollout's prompts, in [0, 1], that may have no ranking because a request
            failed or an answer cannot be read. Their responses get no reward, and ``reward_<reward>/unranked`` is their
            fraction. The reward function fails if there are more.
        when_spent: ``end`` ends the run when the budget of an endpoint is spent. ``skip`` continues: responses without
            a ranking get no reward, and ``reward_<reward>/over_budget`` is their fraction.

    Raises:
        ValueError: a value is not allowed, or two judges have the same name.
    """

    __name__ = "ranking"
    per_sample: ClassVar[bool] = False
    dry_call: ClassVar[bool] = False

    def __init__(
        self,
        judges: Judge | list[Judge],
        question: str = QUESTION,
        orders: int = 2,
        shows_answer: bool = False,
        max_unranked: float = 0.0,
        when_spent: Literal["end", "skip"] = "end",
    ) -> None:
        self.askers = askers_of(judges)
        self.question = question
        self.orders = orders
        self.shows_answer = shows_answer
        self.max_unranked = max_unranked
        self.when_spent = when_spent
        check_ranges(self, orders="at least 1", max_unranked="in [0, 1]")

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        ground_truth: list[Any] | None = None,
        images: list[Any] | None = None,
        log_metric: _Log | None = None,
    ) -> list[float | None]:
        """Return the mean rank of each response as a number in [0, 1]; None where nothing was ranked.

        Args:
            prompts: texts or chat messages; the responses to one prompt are next to each other.
            completions: responses in the same form.
            ground_truth: correct answers, for ``shows_answer``.
            images: images of each prompt, None for one without; by default those in the messages of the prompts.
            log_metric: function that logs a number.

        Raises:
            RuntimeError: more prompts than ``max_unranked`` allows have no ranking.
        """
        rows = shown_rows(prompts, completions, ground_truth, images, self.shows_answer)
        groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.prompt, row.answer, row.images))]
        record = log_metric or (lambda name, value: None)
        results = await asyncio.gather(*(self._rewards(group, record) for group in groups), return_exceptions=True)
        self._check(results)
        return [
            value
            for group, result in zip(groups, results, strict=True)
            for value in self._of_group(group, result, record)
        ]

    def close(self) -> None:
        """Close the connections; another call opens new ones."""
        for asker in self.askers:
            asker.client.close()

    def _check(self, results: Sequence[Any]) -> None:
        """Raise an error that ends the run, or the first of too many."""
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RunError):
                raise result
            if isinstance(result, BudgetSpent) and self.when_spent == "end":
                raise result
        failed = [each for each in results if isinstance(each, RunError) and not isinstance(each, BudgetSpent)]
        if len(failed) > self.max_unranked * len(results):
            raise RunError(
                f"{len(failed)} of {len(results)} prompts have no ranking, more than max_unranked of "
                f"{self.max_unranked:g} allows; the first: {failed[0]}"
            ) from failed[0]
        if failed:
            log.warning("%d of %d prompts have no ranking; the first: %s", len(failed), len(results), failed[0])

    def _of_group(self, group: Sequence[Shown], result: Any, record: _Log) -> list[float | None]:
        """Return the rewards of a group, and log how many of its responses have none because of a failure."""
        for _ in group:
            if self.max_unranked:
                record("unranked", float(isinstance(result, RunError) and not isinstance(result, BudgetSpent)))
            if self.when_spent == "skip":
                record("over_budget", float(isinstance(result, BudgetSpent)))
        return [None] * len(group) if isinstance(result, RunError) else list(result)

    async def _rewards(self, group: Sequence[Shown], record: _Log) -> list[float | None]:
        if len(group) == 1:
            return [None]
        responses = list(dict.fromkeys(row.response for row in group))
        if len(responses) == 1:
            return [0.5] * len(group)
        questions = [self._question(group, order) for order in orders_of(responses, self.orders)]
        answers = await asyncio.gather(*(asker.ask(question) for asker in self.askers for question in questions))
        record("kept_fraction", fmean(is_kept for _, is_kept in answers))
        rewards = {text: [ranking_reward(ranking, text) for ranking, _ in answers] for text in responses}
        record("agreement", krippendorff_alpha(list(rewards.values())))
        return [fmean(rewards[row.response]) for row in group]

    def _question(self, group: Sequence[Shown], responses: Sequence[str]) -> Question[list[str]]:
        """Return the question for the ranking of different responses in this order."""
        labels = [f"R{number}" for number in range(1, len(responses) + 1)]
        parts = [
            marked(f"response {label}", text, group[0].prompt) for label, text in zip(labels, responses, strict=True)
        ]
        ranking = {"type": "array", "items": {"enum": labels}, "minItems": len(labels), "maxItems": len(labels)}
        schema = {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "ranking": ranking},
            "required": ["reason", "ranking"],
            "additionalProperties": False,
        }
        return Question(
            start="\n\n".join(["You rank the responses to a request.", DATA, request_text(group[0])]) + "\n",
            end="\n".join(parts) + "\n" + _ASK.format(question=self.question.strip(), labels=", ".join(labels)),
            schema=schema,
            read=lambda found: _ranking(found, dict(zip(labels, responses, strict=True))),
            allowed=f'{{"ranking": [...]}} with each of {", ".join(labels)} once',
            images=group[0].images,
        )


def orders_of(responses: Sequence[str], count: int) -> list[list[str]]:
    """Return orders of different responses that depend only on the texts; each second one reverses the one before."""

    def digests(seed: int) -> Callable[[str], str]:
        return lambda text: hashlib.sha256(f"{seed}\0{text}".encode(errors="surrogatepass")).hexdigest()

    return [sorted(responses, key=digests(n // 2), reverse=bool(n % 2)) for n in range(count)]


def ranking_reward(ranking: Sequence[str], response: str) -> float:
    """Return the reward of a response in a ranking: 1 for the first, 0 for the last."""
    return 1.0 - ranking.index(response) / (len(ranking) - 1)


def _ranking(found: Mapping[str, Any], responses: Mapping[str, str]) -> list[str] | None:
    """Return the responses, best first; None unless the answer has each label once."""
    labels = found.get("ranking")
    if not isinstance(labels, list) or sorted(map(str, labels)) != sorted(responses):
        return None
    return [responses[str(label)] for label in labels]
