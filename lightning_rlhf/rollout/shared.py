"""One engine for several consecutive ranks: tensor parallelism in the engine, or in the trainer, or in both."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, RolloutEngine
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import Completion, SamplingParams, TokenPrompt


class SharedEngine(RolloutEngine):
    """Lets ``ranks`` consecutive ranks share one engine, which the first of them starts on the GPUs of all.

    On a CPU you get the same completions as from separate engines. Ranks that split a model share their prompts. Those
    are generated once, so that the ranks cannot diverge. All ranks must call the engine equally often, even without
    prompts.

    Args:
        engine: engine that the first rank starts. For tensor parallelism, ``VLLMEngine(tensor_parallel_size=ranks)``.
        ranks: ranks that share an engine, on one machine. At least 2, and a divisor of the number of processes.
    """

    serves_several_ranks = True

    def __init__(self, engine: RolloutEngine, ranks: int) -> None:
        if ranks < 2:
            raise UsageError(f"SharedEngine needs at least 2 ranks, got {ranks}: use the engine without it")
        if engine.serves_several_ranks:
            raise UsageError(f"{type(engine).__name__} can serve several ranks without SharedEngine: set ranks={ranks}")
        self._joint: VLLMEngine | None = None  # the engine, if all ranks take part in a push
        if isinstance(engine, VLLMEngine):
            engine.shared_by = ranks
            self._joint = engine if engine.joins_push else None
        self._engine = engine
        self._ranks = ranks

    @property
    @override
    def traits(self) -> EngineTraits:
        return replace(self._engine.traits, ranks=self._ranks, push_ranks=1 if self._joint else self._ranks)

    @property
    @override
    def source(self) -> str:
        return self._engine.source

    @property
    @override
    def restarted(self) -> int:
        """0 on other ranks than the first."""
        return self._engine.restarted

    @override
    def sleep(self) -> None:
        """All ranks wait until the engine sleeps."""
        self._running.run_on_first(self._engine.sleep)

    @override
    def check(self, sampling: SamplingParams) -> None:
        self._engine.check(sampling)

    @override
    def return_experts(self) -> None:
        self._engine.return_experts()

    def start(self, setup: EngineSetup) -> None:
        """Start the engine on the first rank. Called by all ranks of the run.

        Raises:
            ValueError: the ranks are not on one machine, or cannot be split into groups.
        """
        self.group = RankGroup(self._ranks)
        if self._joint is not None:
            self._joint.join(setup, self.group)
        members = self.group.gather((socket.gethostname(), setup.devices))

        def start() -> None:
            hosts = sorted({host for host, _ in members})
            if len(hosts) > 1:
                raise UsageError(
                    f"the {self._ranks} ranks of a shared engine must be on one machine, but they are on "
                    f"{', '.join(hosts)}: use fewer ranks, or vLLM servers (VLLMServerEngine with ranks: {self._ranks})"
                )
            devices = tuple(device for _, devices in members for device in devices)
            self._engine.start(replace(setup, devices=devices, threads=self._ranks * setup.threads))

        self.group.run_on_first(start)

    @override
    def wait(self) -> str:
        return f"{self._running.run_on_first(self._engine.wait)}, shared by {self._ranks} ranks"

    @override
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All ranks exhaust the parameters, also after an error of all."""
        if self._joint is None:
            if self._engine.traits.sleeps:
                self._running.gather(None)  # the engine wakes up on the GPUs of all ranks, whose memory must be free
            self._running.run_on_first_with(parameters, lambda rest: self._engine.update_weights(rest, version))
            return
        remaining = iter(parameters)
        try:
            self._joint.update_weights(remaining, version)
        except RunError:  # on all ranks; after an error of one, the others do not bring parameters together any more
            deque(remaining, maxlen=0)
            raise

    @override
    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Every rank exhausts the parameters, also after an error."""
        self._running.run_on_first_with(parameters, lambda remaining: self._engine.update_adapters(remaining, version))

    @override
    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Every rank exhausts the parameters."""
        return self._running.run_on_first_with(parameters, self._engine.first_difference)

    @override
    def request(
        self, prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Only on the first rank."""
        return self._engine.request(prompts, sampling, seeds)

    def close(self) -> None:
        """End the engine; not collective."""
        self.group = None
        self._engine.close()

    @property
    def _running(self) -> RankGroup:
        if self.group is None:
            raise RunError("the engine is not running: call start() first")
        return self.group
