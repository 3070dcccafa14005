"""One engine for several neighbouring ranks: tensor parallelism in the engine, or in the trainer, or in both."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_rlhf.rollout.engine import EngineSetup, Finished, RolloutEngine
from lightning_rlhf.rollout.ranks import RankGroup, generate_together
from lightning_rlhf.rollout.server_engine import VLLMServerEngine
from lightning_rlhf.types import Completion, SamplingParams


class SharedEngine(RolloutEngine):
    """The first of ``ranks`` consecutive ranks has an engine on the GPUs of all; the others ask it.

    On a CPU the same requests get the same completions as from engines of their own. Ranks that split a model between
    them ask for the same prompts: these are generated once, so that the ranks cannot drift apart.

    Args:
        engine: that the first rank starts; for tensor parallelism ``VLLMEngine(tensor_parallel_size=ranks)``.
        ranks: that share it, at least 2; a divisor of the number of processes, all of a group on one machine.
    """

    def __init__(self, engine: RolloutEngine, ranks: int) -> None:
        if ranks < 2:
            raise ValueError(f"an engine is shared by at least 2 ranks, got {ranks}: take the engine itself")
        if isinstance(engine, (SharedEngine, VLLMServerEngine)):
            raise ValueError(f"{type(engine).__name__} serves several ranks by itself: give it ranks={ranks}")
        self._engine, self._ranks = engine, ranks
        self._group: RankGroup | None = None

    @property
    def ranks(self) -> int:
        """See :meth:`RolloutEngine.ranks`."""
        return self._ranks

    @property
    def swaps_adapters(self) -> bool:
        """See :meth:`RolloutEngine.swaps_adapters`."""
        return self._engine.swaps_adapters

    @property
    def gpu_share(self) -> float:
        """See :meth:`RolloutEngine.gpu_share`."""
        return self._engine.gpu_share

    @property
    def sleeps(self) -> bool:
        """See :meth:`RolloutEngine.sleeps`."""
        return self._engine.sleeps

    def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`; the first rank sends the engine to sleep, the others wait for it."""
        self._running.first_does(self._engine.sleep)

    def check(self, sampling: SamplingParams) -> None:
        """See :meth:`RolloutEngine.check`."""
        self._engine.check(sampling)

    def start(self, setup: EngineSetup) -> None:
        """Start the engine on the first rank. All ranks of the run.

        Raises:
            ValueError: the ranks are not on one machine, or do not fall into groups.
        """
        self._group = RankGroup(self._ranks)
        members = self._group.gather((socket.gethostname(), setup.devices))

        def start() -> None:
            hosts = sorted({host for host, _ in members})
            if len(hosts) > 1:
                raise ValueError(f"{self._ranks} ranks share an engine, but they are on {', '.join(hosts)}: take fewer")
            devices = tuple(device for _, devices in members for device in devices)
            self._engine.start(replace(setup, devices=devices))

        self._group.first_does(start)

    def wait(self) -> str:
        """See :meth:`RolloutEngine.wait`."""
        return f"{self._running.first_does(self._engine.wait)}, shared by {self._ranks} ranks"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_weights`; every rank exhausts the parameters, whatever happens."""
        self._push(self._engine.update_weights, iter(parameters), version)

    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_adapters`; every rank exhausts the parameters, whatever happens."""
        self._push(self._engine.update_adapters, iter(parameters), version)

    def _push(self, update: Callable[[Any, int], None], parameters: Iterator[tuple[str, Tensor]], version: int) -> None:
        group = self._running

        def push() -> None:
            try:
                update(parameters, version)
            finally:
                deque(parameters, maxlen=0)

        if not group.is_first:
            deque(parameters, maxlen=0)
        group.first_does(push)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> list[Completion]:
        """See :meth:`RolloutEngine.generate`; a rank without prompts calls it too."""
        return generate_together(self._running, self._engine.generate, prompts, sampling, seeds, finished)

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """See :meth:`RolloutEngine.first_difference`; every rank exhausts the parameters."""
        group, parameters = self._running, iter(parameters)

        def compare() -> str | None:
            try:
                return self._engine.first_difference(parameters)
            finally:
                deque(parameters, maxlen=0)

        if not group.is_first:
            deque(parameters, maxlen=0)
        return group.first_does(compare)

    def close(self) -> None:
        """End the engine; each rank for itself."""
        self._group = None
        self._engine.close()

    @property
    def _running(self) -> RankGroup:
        if self._group is None:
            raise RuntimeError("the engine is not running: call start() first")
        return self._group
