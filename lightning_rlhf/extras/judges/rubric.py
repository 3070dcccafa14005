"""Rubrics: criteria with weights and scales, by which a judge grades responses one criterion at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.paths import describe_missing_path
from lightning_rlhf.rewards.results import RESERVED_METRICS

_NAME = re.compile(r"(?!agreement)[A-Za-z][A-Za-z0-9_-]*")
_RESERVED_NAMES = (*RESERVED_METRICS, "kept_fraction", "over_budget")  # metrics of the reward
_MERGE = "tag:yaml.org,2002:merge"  # of the key <<
_TOLERANCE = 1e-9  # of a grade between two steps, for scales such as 0 to 1 in steps of 0.1
_MOST_LISTED = 101  # grades that a request lists one by one


@dataclass(frozen=True)
class Scale:
    """Grades that a judge may give.

    Args:
        lowest: grade of the worst response, which counts 0.
        highest: grade of the best response, which counts 1.
        step: distance between two grades. None allows all numbers from ``lowest`` to ``highest``.

    Raises:
        ValueError: the numbers do not make a scale.
    """

    lowest: float = 1
    highest: float = 5
    step: float | None = 1

    def __post_init__(self) -> None:
        for name in ("lowest", "highest", "step"):
            value = getattr(self, name)
            if not _is_number(value) and not (name == "step" and value is None):
                raise UsageError(f"{name} of a scale must be a number, got {value!r}")
        if not self.lowest < self.highest:
            raise UsageError(
                f"a scale must begin below its end, got lowest {self.lowest:g} and highest {self.highest:g}: swap "
                f"them, and write the question so that the better response gets the higher grade"
            )
        if self.step is not None and (self.step <= 0 or not self._is_step(self.highest)):
            raise UsageError(
                f"the step of a scale must divide the distance from {self.lowest:g} to {self.highest:g}, got "
                f"{self.step:g}: set null for all numbers between"
            )

    def fraction(self, grade: float) -> float | None:
        """Return where a grade is on the scale, in [0, 1]; None if it is not on the scale."""
        if not self.lowest <= grade <= self.highest or not self._is_step(grade):
            return None
        return (grade - self.lowest) / (self.highest - self.lowest)

    def _is_step(self, grade: float) -> bool:
        steps = 0.0 if self.step is None else (grade - self.lowest) / self.step
        return abs(steps - round(steps)) < _TOLERANCE

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of a grade."""
        count = math.inf if self.step is None else round((self.highest - self.lowest) / self.step) + 1
        if self.step is None or count > _MOST_LISTED:
            return {"type": "number", "minimum": self.lowest, "maximum": self.highest}
        return {"enum": [_plain(self.lowest + i * self.step) for i in range(int(count))]}

    def __str__(self) -> str:
        whole = self.step == 1 and float(self.lowest).is_integer()
        steps = "" if whole or self.step is None else f" in steps of {self.step:g}"
        return f"a {'whole ' if whole else ''}number from {self.lowest:g} to {self.highest:g}{steps}"


@dataclass(frozen=True)
class Criterion:
    """One question about a response.

    Args:
        name: name in metrics: letters, digits, ``_`` and ``-``.
        question: what the judge grades, for example ``Is every statement correct?``
        weight: weight in the reward. 0 only logs the grade.
        scale: grades; None is the rubric's.
        meanings: what a grade means, for some or all grades.

    Raises:
        ValueError: a value is not allowed.
    """

    name: str
    question: str
    weight: float = 1.0
    scale: Scale | None = None
    meanings: dict[float, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name in _RESERVED_NAMES:
            raise UsageError(
                f"the name of a criterion must begin with a letter, have only letters, digits, '_' and '-', and be no "
                f"metric of the reward (agreement..., {', '.join(_RESERVED_NAMES)}), got {self.name!r}"
            )
        if not isinstance(self.question, str) or not self.question.strip():
            raise UsageError(f"criterion {self.name} needs a question for the judge, got {self.question!r}")
        if not _is_number(self.weight) or self.weight < 0:
            raise UsageError(
                f"the weight of criterion {self.name} must be a number of at least 0, got {self.weight!r}: to punish "
                f"something, ask whether the response is without it"
            )
        if not isinstance(self.meanings, Mapping):
            raise UsageError(f"meanings of criterion {self.name} must be texts by grade, got {self.meanings!r}")

    def on(self, scale: Scale) -> Criterion:
        """Return this criterion with its scale, or with another one if it has none.

        Raises:
            UsageError: a meaning is of a grade that the scale does not have.
        """
        scale = self.scale or scale
        for grade in self.meanings:
            if not _is_number(grade) or scale.fraction(grade) is None:
                raise UsageError(f"criterion {self.name} has a meaning of the grade {grade!r}, but grades are {scale}")
        return replace(self, scale=scale)


@dataclass(frozen=True)
class Rubric:
    """Criteria by which a judge grades responses, one criterion in each request.

    Args:
        criteria: criteria with different names.
        instructions: text about the task for the judge, such as who reads the responses.
        scale: grades of the criteria that have no scale of their own.
        shows_answer: whether the judge sees the correct answer of the row, from the column ``ground_truth``.

    Raises:
        ValueError: a value is not allowed.
    """

    criteria: list[Criterion]
    instructions: str = ""
    scale: Scale = field(default_factory=Scale)
    shows_answer: bool = False

    def __post_init__(self) -> None:
        if not self.criteria:
            raise UsageError("a rubric needs at least one criterion, got none")
        names = [criterion.name for criterion in self.criteria]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two criteria have the name {repeated[0]!r}: set another name for one of them")
        if not isinstance(self.instructions, str) or not isinstance(self.shows_answer, bool):
            raise UsageError(
                f"instructions must be a text and shows_answer true or false, got {self.instructions!r} and "
                f"{self.shows_answer!r}"
            )
        if not sum(criterion.weight for criterion in self.criteria) > 0:
            raise UsageError("the weights of a rubric must have a positive sum, got 0: set the weight of a criterion")
        object.__setattr__(self, "criteria", [criterion.on(self.scale) for criterion in self.criteria])

    def only(self, name: str) -> Rubric:
        """Return the rubric with one criterion, whatever its weight.

        Raises:
            UsageError: it has no criterion of this name.
        """
        chosen = [replace(criterion, weight=1.0) for criterion in self.criteria if criterion.name == name]
        if not chosen:
            names = ", ".join(criterion.name for criterion in self.criteria)
            raise UsageError(f"the rubric has no criterion {name!r}; it has {names}")
        return replace(self, criteria=chosen)

    def reward(self, fractions: Mapping[str, float]) -> float:
        r"""Return the weighted mean of the grades.

        .. math:: r = \sum_k w_k f_k / \sum_k w_k

        Args:
            fractions: grade of each criterion as a fraction of its scale, in [0, 1].
        """
        total = math.fsum(criterion.weight * fractions[criterion.name] for criterion in self.criteria)
        return total / math.fsum(criterion.weight for criterion in self.criteria)

    @classmethod
    def read(cls, path: str | Path) -> Rubric:
        """Read a rubric from a YAML or JSON file whose keys are the arguments of these classes.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file has no valid rubric.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise MissingFileError(f"no rubric at {str(path)!r}: {describe_missing_path(str(path))}")
        try:
            return cls.of(_Loader(file.read_text(encoding="utf-8")).get_single_data())
        except (UsageError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: {error}") from None
        except yaml.YAMLError as error:
            raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None

    @classmethod
    def of(cls, content: Any) -> Rubric:
        """Return the rubric in the content of such a file.

        Raises:
            UsageError: it has no valid rubric.
        """
        given = _checked(cls, content, "the rubric")
        if not isinstance(given["criteria"], list):
            raise UsageError(f"criteria must be a list, got {given['criteria']!r:.80}: begin each with '- name: ...'")
        criteria = [_criterion(entry, number) for number, entry in enumerate(given["criteria"], 1)]
        return cls(**{**_with_scale(given, "the rubric"), "criteria": criteria})


class _Loader(yaml.SafeLoader):
    """Reads YAML, and raises an error for a key that occurs twice, of which YAML would silently use the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        if repeated := [key for key in keys if keys.count(key) > 1]:
            line = node.start_mark.line + 1
            raise UsageError(f"the key {repeated[0]!r} occurs twice in the part that begins at line {line}: remove one")
        return super().construct_mapping(node, deep)


def _criterion(entry: Any, number: int) -> Criterion:
    where = f"criterion {number}"
    return Criterion(**_with_scale(_checked(Criterion, entry, where), where))


def _with_scale(given: dict[str, Any], where: str) -> dict[str, Any]:
    scale = given.get("scale")
    return given if scale is None else {**given, "scale": Scale(**_checked(Scale, scale, f"the scale of {where}"))}


def _checked(kind: type[Any], value: Any, where: str) -> dict[str, Any]:
    """Return a mapping of a file that has the arguments of a class.

    Raises:
        UsageError: it is not a mapping, or a key is unknown or missing.
    """
    names = [each.name for each in fields(kind)]
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    if not isinstance(value, dict):
        raise UsageError(f"{where} must have the keys {', '.join(needed or names)}, got {value!r:.80}")
    for key in value:
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{where} has the key {key!r}, but allowed are {', '.join(names)}{hint}")
    if missing := [name for name in needed if name not in value]:
        raise UsageError(f"{where} has no {missing[0]}: add the key {missing[0]!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(number: float) -> float:
    """Return a number as JSON should show it: 3 instead of 3.0, and 0.3 instead of 0.30000000000000004."""
    rounded = round(number, 9)
    return int(rounded) if float(rounded).is_integer() else rounded
