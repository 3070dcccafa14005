"""Neighbouring ranks of which the first acts for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_rlhf.rollout.engine import EngineDied, Finished
from lightning_rlhf.types import Completion, SamplingParams

T = TypeVar("T")
_PATIENCE = timedelta(days=1)  # a rollout takes as long as it takes; the ranks that die are missed by others
_Generate = Callable[[Sequence[Sequence[int]], SamplingParams, Sequence[int], Finished | None], list[Completion]]
_FAULTS = {kind.__name__: kind for kind in (EngineDied, ValueError)}


def world_size() -> int:
    """Processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class RankGroup:
    """``ranks`` consecutive ranks, the first of which acts for all. Every rank of the run must make one.

    They talk over gloo, beside whatever the trainer uses. Every method is called by all of them in the same order.

    Args:
        ranks: how many, a divisor of the number of processes.

    Raises:
        ValueError: the processes do not fall into groups of that size.
    """

    def __init__(self, ranks: int) -> None:
        world = world_size()
        if world % ranks:
            raise ValueError(
                f"{ranks} ranks are to share an engine, but the run has {world}: take a divisor of {world}"
            )
        self.ranks = ranks
        self._group: Any = dist.new_subgroups(ranks, backend="gloo", timeout=_PATIENCE)[0] if ranks > 1 else None
        self._number = dist.get_rank(self._group) if ranks > 1 else 0
        self._first = dist.get_rank() - self._number if ranks > 1 else 0

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for the others."""
        return self._number == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, for the first rank; the others get an empty list."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.ranks if self.is_first else []
        with self._or_death():
            dist.gather_object(value, values or None, dst=self._first, group=self._group)
        return values

    def first_does(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on the first rank; if it fails there, it fails on all ranks with the same words."""
        return self.first_deals(lambda: [action()] * self.ranks)

    def first_deals(self, action: Callable[[], list[T]]) -> T:
        """What ``action`` returns on the first rank, one for each rank; faults as in :meth:`first_does`."""
        if self._group is None:
            return action()[0]
        if not self.is_first:
            return self._receive()
        try:
            dealt = [("done", value) for value in action()]
        except Exception as error:
            name = type(error).__name__
            words = str(error) if name in _FAULTS or type(error) is RuntimeError else f"{name}: {error}"
            self._send([(name, words)] * self.ranks)
            raise
        self._send(dealt)
        return dealt[0][1]

    def _send(self, dealt: list[Any]) -> None:
        with self._or_death():
            dist.scatter_object_list([None], dealt, src=self._first, group=self._group)

    def _receive(self) -> Any:
        received: list[Any] = [None]
        with self._or_death():
            dist.scatter_object_list(received, None, src=self._first, group=self._group)
        how, what = received[0]
        if how == "done":
            return what
        raise _FAULTS.get(how, RuntimeError)(what)

    @contextmanager
    def _or_death(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            last = self._first + self.ranks - 1
            raise EngineDied(
                f"ranks {self._first} to {last} share an engine, and one of them is gone: {error}"
            ) from error


def generate_together(
    group: RankGroup,
    generate: _Generate,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    finished: Finished | None = None,
) -> list[Completion]:
    """Have the first rank generate for all; what several ranks ask in the same words is generated once.

    Args:
        group: the ranks.
        generate: an engine's, called on the first rank.
        prompts: of this rank.
        sampling: the same on all ranks.
        seeds: of this rank, one per prompt.
        finished: is told of the first rank's own completions as they come; the others get theirs together.

    Returns:
        This rank's completions.

    Raises:
        ValueError: the ranks sample differently.
    """
    asked = group.gather(([list(prompt) for prompt in prompts], list(seeds), sampling))

    def mine(number: int, completion: Completion) -> None:
        if finished is not None and number < len(prompts):  # what this rank asks stands first
            finished(number, completion)

    def answers() -> list[list[Completion]]:
        if any(one_sampling != sampling for _, _, one_sampling in asked):
            raise ValueError(f"ranks that share an engine sample differently: {[one for _, _, one in asked]}")
        once = [request for number, request in enumerate(asked) if request not in asked[:number]]
        together = [prompt for rows, _, _ in once for prompt in rows], [seed for _, rows, _ in once for seed in rows]
        completions = iter(generate(together[0], sampling, together[1], mine))
        found = [[next(completions) for _ in rows] for rows, _, _ in once]
        return [found[once.index(request)] for request in asked]

    return group.first_deals(answers)
