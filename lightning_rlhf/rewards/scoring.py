"""The judging of a rollout: completions as they come, rewards at the end, faults by each function's policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.rewards.adapter import RewardFunction
from lightning_rlhf.rewards.conventions import EndsTheRun, Judged, TrainerState
from lightning_rlhf.rewards.dispatch import Jury, Said
from lightning_rlhf.rewards.worker import Failure

_SHOWN = 80  # characters of a column in a message
Told = dict[str, tuple[float, float]]  # metrics by name, each as a sum and the number of its terms


@dataclass(frozen=True)
class Scores:
    """What all reward functions said of a rollout.

    Args:
        rewards: by name, (B,) each, NaN where the function does not apply.
        told: metrics.
    """

    rewards: dict[str, Tensor]
    told: Told


class Scoring:
    """The judging of one rollout: completions come as they finish, rewards are had at the end.

    What comes early is only sent earlier: each completion has its place, so the rewards are the same in whatever order
    they come.

    Args:
        jury: whose functions judge.
        state: of the run, for functions that ask for ``trainer_state``.
    """

    def __init__(self, jury: Jury, state: TrainerState | None = None) -> None:
        self._jury, self._state = jury, state or TrainerState()
        self._sent: dict[str, dict[int, Future[Said]]] = {}

    @property
    def streams(self) -> bool:
        """Whether any function judges a completion before all are there."""
        return any(reward.alone for reward in self._jury.rewards)

    @property
    def functions(self) -> list[RewardFunction]:
        """That judge."""
        return self._jury.rewards

    def add(self, place: int, row: Mapping[str, list[Any]]) -> None:
        """A completion that is finished.

        Args:
            place: in the rollout.
            row: what is offered of it: lists of one.
        """
        for reward in self._jury.rewards:
            if reward.alone:
                self._sent.setdefault(reward.label, {})[place] = self._submit(reward, row, [place])

    def rehearse(self, offered: Mapping[str, list[Any]]) -> None:
        """Try every function that may be tried, before a run.

        Args:
            offered: as for :meth:`finish`, made up.

        Raises:
            ValueError: one does not work.
        """
        for reward in self._jury.rewards:
            if not reward.may_be_tried:
                continue
            for outcome in self._jury.outcomes(reward, self._calls(reward, offered)):
                if isinstance(outcome, Failure):
                    raise ValueError(
                        f"reward function {reward.label!r} {outcome.told}; it was tried before the run on a completion "
                        f"that repeats the prompt, and an empty one (dry_call: false leaves that out)"
                    ) from outcome.cause

    def finish(self, offered: Mapping[str, list[Any]]) -> Scores:
        """The rewards, after all completions are there.

        Args:
            offered: lists with one entry per completion, in the order of their places.

        Returns:
            Rewards and metrics.

        Raises:
            RuntimeError: a function failed and its policy is to end the run, or it failed too often.
        """
        # What works elsewhere is sent off before this thread is busy.
        busy = sorted(self._jury.rewards, key=lambda reward: not reward.alone and not reward.call.is_async)
        calls = {reward.label: self._calls(reward, offered) for reward in busy}
        rewards, told = dict[str, Tensor](), Told()
        for reward in self._jury.rewards:
            outcomes = self._jury.outcomes(reward, calls[reward.label])
            rewards[reward.label] = self._settle(reward, outcomes, offered, told)
        return Scores(rewards, told)

    def _calls(self, reward: RewardFunction, offered: Mapping[str, list[Any]]) -> list[Future[Said]]:
        """All calls of a function, those that were made before among them."""
        count = len(offered["completions"])
        if not reward.alone:
            return [self._submit(reward, offered, range(count))]
        made = self._sent.setdefault(reward.label, {})
        for place in range(count):
            if place not in made:
                row = {name: values[place : place + 1] for name, values in offered.items()}
                made[place] = self._submit(reward, row, [place])
        return [made[place] for place in range(count)]

    def _submit(self, reward: RewardFunction, offered: Mapping[str, Any], places: Sequence[int]) -> Future[Said]:
        given = {**reward.converted(offered), "trainer_state": self._state}
        return self._jury.submit(reward, given, places)

    def _settle(
        self, reward: RewardFunction, outcomes: list[Said], offered: Mapping[str, list[Any]], told: Told
    ) -> Tensor:
        """The rewards of one function by its policy, and its metrics."""
        count = len(offered["completions"])
        share = 1 if reward.alone else count  # completions of a call
        values, numbers = list[float | None](), dict[str, list[float]]()
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, Judged):
                values += outcome.values
                for name, found in outcome.numbers.items():
                    numbers.setdefault(name, []).extend(found)
            elif outcome.ends:
                raise EndsTheRun(f"reward function {reward.label!r} {outcome.told}") from outcome.cause
            elif reward.on_error == "raise":
                shown = reward.function if isinstance(reward.function, str) else "..."
                raise RuntimeError(
                    f"reward function {reward.label!r} {outcome.told} ({_whose(outcome, i, reward, offered)}); "
                    f"under rewards, {{function: {shown}, on_error: skip}} leaves such a response out, and zero gives "
                    f"it 0{_one_by_one(reward, count)}"
                ) from outcome.cause
            else:
                values += [math.nan if reward.on_error == "skip" else 0.0] * share
        if len(failures) * share > reward.max_error_rate * count:
            raise RuntimeError(
                f"reward function {reward.label!r} failed for {len(failures) * share} of {count} completions, more "
                f"than its max_error_rate of {reward.max_error_rate:g} allows; the first time it {failures[0].told} "
                f"({_whose(failures[0], outcomes.index(failures[0]), reward, offered)}){_one_by_one(reward, count)}"
            ) from failures[0].cause
        late = sum(failure.late for failure in failures) * share
        counts = {"not_applicable": float(values.count(None))}
        if reward.on_error != "raise":
            counts |= {"errors": float(len(failures) * share - late), "timeouts": float(late)}
        told |= {f"reward_{reward.label}/{name}": (number, float(count)) for name, number in counts.items()}
        told |= {f"reward_{reward.label}/{name}": (sum(all_), float(len(all_))) for name, all_ in numbers.items()}
        return torch.tensor([math.nan if value is None else value for value in values])


def _whose(failure: Failure, call: int, reward: RewardFunction, offered: Mapping[str, list[Any]]) -> str:
    """Which completion a call failed for, as far as that is known, and what its row holds."""
    count = len(offered["completions"])
    place = call if reward.alone or count == 1 else failure.place
    if place is None:
        return f"a call for all {count} completions, so it is not known for which"
    shown = {"data_source": "data_source", "prompts": "prompt"}
    row = [f"{name} {str(offered[column][place])[:_SHOWN]!r}" for column, name in shown.items() if column in offered]
    return ", ".join([f"completion {place} of {count}, counted from 0", *row])


def _one_by_one(reward: RewardFunction, count: int) -> str:
    """How a fault costs its own response alone, where one call judged several."""
    if reward.alone or count == 1:
        return ""
    return (
        f"; one call judged all {count}, so they fail together: with per_sample: true the function is called once for "
        f"each completion, and only the bad one fails"
    )
