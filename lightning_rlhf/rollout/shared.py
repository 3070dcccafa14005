"""One engine for several consecutive ranks: tensor parallelism in the engine, or in the trainer, or in both."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.rollout.engine import EngineSetup, Generation, OnFinished, RolloutEngine, Serve
from lightning_rlhf.rollout.ranks import RankGroup, generate_together, serve_together, submit_together
from lightning_rlhf.rollout.vllm.server.engine import VLLMServerEngine
from lightning_rlhf.types import Completion, SamplingParams


class SharedEngine(RolloutEngine):
    """An engine that generates for ``ranks`` consecutive ranks: started by the first of them, on the GPUs of all.

    On a CPU the completions are the same as those of separate engines. Ranks that split a model have the same prompts;
    these are generated once, so that the ranks cannot diverge.

    Args:
        engine: engine that the first rank starts; for tensor parallelism ``VLLMEngine(tensor_parallel_size=ranks)``.
        ranks: number of ranks that share an engine, on one machine; at least 2, a divisor of the number of processes.
    """

    def __init__(self, engine: RolloutEngine, ranks: int) -> None:
        if ranks < 2:
            raise UsageError(f"SharedEngine needs at least 2 ranks, got {ranks}: use the engine without it")
        if isinstance(engine, (SharedEngine, VLLMServerEngine)):
            raise UsageError(f"{type(engine).__name__} can serve several ranks without SharedEngine: set ranks={ranks}")
        self._engine = engine
        self._ranks = ranks
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

    def matrix_dtype(self, dtype: str) -> str:
        """See :meth:`RolloutEngine.matrix_dtype`."""
        return self._engine.matrix_dtype(dtype)

    @property
    def overlaps(self) -> bool:
        """See :meth:`RolloutEngine.overlaps`."""
        return self._engine.overlaps

    @property
    def shares_cores(self) -> bool:
        """See :meth:`RolloutEngine.shares_cores`."""
        return self._engine.shares_cores

    @property
    def needs_idle_push(self) -> bool:
        """See :meth:`RolloutEngine.needs_idle_push`."""
        return self._engine.needs_idle_push

    @property
    def mixes_versions(self) -> bool:
        """See :meth:`RolloutEngine.mixes_versions`."""
        return self._engine.mixes_versions

    def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`; all ranks wait until the engine sleeps."""
        self._running.run_on_first(self._engine.sleep)

    def check(self, sampling: SamplingParams) -> None:
        """See :meth:`RolloutEngine.check`."""
        self._engine.check(sampling)

    def start(self, setup: EngineSetup) -> None:
        """Start the engine on the first rank. Called by all ranks of the run.

        Raises:
            ValueError: the ranks are not on one machine, or cannot be split into groups.
        """
        self._group = RankGroup(self._ranks)
        members = self._group.gather((socket.gethostname(), setup.devices))

        def start() -> None:
            hosts = sorted({host for host, _ in members})
            if len(hosts) > 1:
                raise UsageError(
                    f"the {self._ranks} ranks of a shared engine must be on one machine, but they are on "
                    f"{', '.join(hosts)}: use fewer ranks"
                )
            devices = tuple(device for _, devices in members for device in devices)
            self._engine.start(replace(setup, devices=devices, threads=self._ranks * setup.threads))

        self._group.run_on_first(start)

    def wait(self) -> str:
        """See :meth:`RolloutEngine.wait`."""
        return f"{self._running.run_on_first(self._engine.wait)}, shared by {self._ranks} ranks"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_weights`; every rank exhausts the parameters, also after an error."""
        self._running.run_on_first_with(parameters, lambda remaining: self._engine.update_weights(remaining, version))

    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_adapters`; every rank exhausts the parameters, also after an error."""
        self._running.run_on_first_with(parameters, lambda remaining: self._engine.update_adapters(remaining, version))

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """See :meth:`RolloutEngine.first_difference`; every rank exhausts the parameters."""
        return self._running.run_on_first_with(parameters, self._engine.first_difference)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """See :meth:`RolloutEngine.generate`; ranks without prompts must call it too."""
        return generate_together(
            self._running, self._engine.generate, prompts=prompts, sampling=sampling, seeds=seeds,
            on_finished=on_finished,
        )  # fmt: skip

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> Generation:
        """See :meth:`RolloutEngine.submit`; ranks without prompts must call it too."""
        return submit_together(
            self._running, self._engine.submit, prompts=prompts, sampling=sampling, seeds=seeds, on_finished=on_finished
        )

    def serve(self, requests: Sequence[Any], handle: Serve, on_finished: OnFinished | None = None) -> Generation:
        """See :meth:`RolloutEngine.serve`; ranks without requests must call it too."""

        def serve_all(all_requests: list[Any], on_any_finished: OnFinished | None) -> Generation:
            return self._engine.serve(all_requests, handle, on_any_finished)

        return serve_together(self._running, serve_all, requests, on_finished)

    def close(self) -> None:
        """End the engine; not collective."""
        self._group = None
        self._engine.close()

    @property
    def _running(self) -> RankGroup:
        if self._group is None:
            raise RunError("the engine is not running: call start() first")
        return self._group
