"""A reward from judges that grade each response by the criteria of a rubric."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, ClassVar, Literal

from lightning_rlhf.extras.judges.agreement import krippendorff_alpha
from lightning_rlhf.extras.judges.asking import Judge, Question, askers_of
from lightning_rlhf.extras.judges.endpoint import BudgetSpent
from lightning_rlhf.extras.judges.judge import plain_number
from lightning_rlhf.extras.judges.rubric import Criterion, Rubric, Scale
from lightning_rlhf.extras.judges.shown import DATA, Shown, marked, request_text, shown_rows

_LAST_RESPONSES = 256  # for the agreement of judges
_ASK = """Criterion: {question}
The grade is {scale}.{meanings}
Grade the response by this criterion only. Give your reason in one or two sentences, then the grade. End your answer
with one JSON object of this form: {{"reason": "...", "grade": ...}}"""


class RubricReward:
    """Grades responses by the criteria of a rubric; the reward is the weighted mean of the grades, in [0, 1].

    Each request asks about one criterion, which stands at its end. All before is equal for all criteria of a response,
    so an inference server with a prefix cache computes it once. With several judges, a grade is the mean over them.

    The run logs the mean grade of each criterion, as a fraction of its scale, as ``reward_<reward>/<criterion>``, and
    the fraction of questions that needed no request as ``reward_<reward>/kept_fraction``. With several judges, it also
    logs ``reward_<reward>/agreement_<criterion>``, Krippendorff's alpha over the last 256 responses.

    Your policy learns to write what gets high grades, and text may manipulate a judge although it is declared as data:
    read the responses with the highest grades.

    If a request fails, or an answer has no grade that is on the scale, the reward function fails for this response, and
    its ``on_error`` and ``max_error_rate`` decide what happens.

    Args:
        rubric: file of the rubric, see :class:`.Rubric`, its content as a mapping, or the object.
        judges: one or several judges with different names.
        criterion: name of the only criterion to grade by; None takes all. List the reward again with a criterion and
            ``weight: 0`` to see its grade next to each response. Questions that the other one asks are not repeated.
        when_spent: ``end`` ends the run when the budget of an endpoint is spent. ``skip`` continues: responses without
            grades get no reward, and ``reward_<reward>/over_budget`` is their fraction.

    Raises:
        ValueError: the rubric is not valid, or two judges have the same name.
    """

    per_sample: ClassVar[bool] = True
    dry_call: ClassVar[bool] = False

    def __init__(
        self,
        rubric: Any,  # with the class, the parser would read the file, and errors would not name it
        judges: Judge | list[Judge],
        criterion: str | None = None,
        when_spent: Literal["end", "skip"] = "end",
    ) -> None:
        if isinstance(rubric, str):
            rubric = Rubric.read(rubric)
        self.rubric = rubric if isinstance(rubric, Rubric) else Rubric.of(rubric)
        if criterion is not None:
            self.rubric = self.rubric.only(criterion)
        self.__name__ = criterion or "rubric"
        self.askers = askers_of(judges)
        self.when_spent = when_spent
        self._last = {each.name: deque[list[float]](maxlen=_LAST_RESPONSES) for each in self.rubric.criteria}

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        ground_truth: list[Any] | None = None,
        images: list[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | None]:
        """Return the weighted mean of each response's grades; None where the budget was spent.

        Args:
            prompts: texts or chat messages.
            completions: responses in the same form.
            ground_truth: correct answers, for a rubric that shows them.
            images: images of each prompt, None for one without; by default those in the messages of the prompts.
            log_metric: function that logs a number.

        Raises:
            RuntimeError: no answer, or one without a grade on the scale.
        """
        rows = shown_rows(prompts, completions, ground_truth, images, self.rubric.shows_answer)
        log = log_metric or (lambda name, value: None)
        return list(await asyncio.gather(*(self._reward(row, log) for row in rows)))

    def close(self) -> None:
        """Close the connections; another call opens new ones."""
        for asker in self.askers:
            asker.client.close()

    async def _reward(self, row: Shown, log: Callable[[str, float], None]) -> float | None:
        try:
            grades = await self._grades(row, log)
        except BudgetSpent:
            if self.when_spent == "end":
                raise
            log("over_budget", 1.0)
            return None
        if self.when_spent == "skip":
            log("over_budget", 0.0)
        for name, values in grades.items():
            log(name, fmean(values))
            if len(self.askers) > 1:
                self._last[name].append(values)
                log(f"agreement_{name}", krippendorff_alpha(self._last[name]))
        return self.rubric.reward({name: fmean(values) for name, values in grades.items()})

    async def _grades(self, row: Shown, log: Callable[[str, float], None]) -> dict[str, list[float]]:
        """Return the grades of each criterion as fractions of its scale, one of each judge."""
        start = self.start(row)
        questions = [grade_question(start, criterion, row) for criterion in self.rubric.criteria]
        answers = await asyncio.gather(*(asker.ask(question) for asker in self.askers for question in questions))
        log("kept_fraction", fmean(is_kept for _, is_kept in answers))
        count = len(questions)
        return {each.name: [grade for grade, _ in answers[i::count]] for i, each in enumerate(self.rubric.criteria)}

    def start(self, row: Shown) -> str:
        """Return the text with which all questions about a response begin."""
        instructions = [self.rubric.instructions.strip()] if self.rubric.instructions.strip() else []
        head = ["You grade one response to a request by one criterion.", *instructions, DATA, request_text(row)]
        return "\n\n".join([*head, marked("response", row.response, row.prompt)]) + "\n"


def grade_question(start: str, criterion: Criterion, row: Shown) -> Question[float]:
    """Return the question for the grade of a response by a criterion, as a fraction of its scale.

    Args:
        start: text about the response.
        criterion: criterion with a scale.
        row: response.
    """
    scale = criterion.scale
    assert scale is not None
    meanings = "".join(f"\n{grade:g} means: {meaning}" for grade, meaning in sorted(criterion.meanings.items()))
    schema = {
        "type": "object",
        "properties": {"reason": {"type": "string"}, "grade": scale.schema},
        "required": ["reason", "grade"],
        "additionalProperties": False,
    }
    return Question(
        start=start,
        end=_ASK.format(question=criterion.question.strip(), scale=scale, meanings=meanings),
        schema=schema,
        read=lambda found: _grade(found, scale),
        allowed=f'{{"grade": {scale}}} for {criterion.name}',
        images=row.images,
    )


def _grade(found: Mapping[str, Any], scale: Scale) -> float | None:
    grade = plain_number(found.get("grade"))
    return None if grade is None else scale.fraction(grade)
