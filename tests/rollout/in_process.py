"""vLLM in the process of the tests, so that they can inspect it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, finished
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.rollout.vllm.requests import as_completion, as_requests
from lightning_rlhf.rollout.vllm.sync import PublishedNames, check_receives
from lightning_rlhf.types import Completion, SamplingParams


class InProcessVLLMEngine(VLLMEngine):
    """vLLM in the trainer's process, for debugging and for systems that do not allow child processes.

    The random state is restored after every call; vLLM's changes of threads and torch.distributed are not undone.

    Args:
        gpu_memory_utilization: argument of :class:`VLLMEngine`.
        tensor_parallel_size: must be 1.
        arguments: argument of :class:`VLLMEngine`.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        tensor_parallel_size: int = 1,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(gpu_memory_utilization, tensor_parallel_size, arguments=arguments)
        if tensor_parallel_size != 1:
            raise UsageError(
                f"an engine in the trainer's process cannot use several devices, got tensor_parallel_size "
                f"{tensor_parallel_size}: use VLLMEngine"
            )
        self._core: Any = None

    def start(self, setup: EngineSetup) -> None:
        """Start the engine and wait until it is ready."""
        self._log = setup.log
        self._published = PublishedNames(setup.model)
        self._dtype = self._matrix_dtype(setup)
        environment = self._environment(setup)
        arguments = self.llm_arguments(setup)
        check_receives(setup.model, arguments["max_model_len"], arguments["load_format"])
        os.environ.update({name: value for name, value in environment.items() if name.startswith(("VLLM_", "TRITON_"))})
        with _preserved_random_state():
            from lightning_rlhf.rollout.vllm.core import VLLMCore

            self._core = VLLMCore(arguments)

    @property
    def traits(self) -> EngineTraits:
        """See :attr:`RolloutEngine.traits`; the engine computes with the trainer's threads."""
        return replace(super().traits, overlaps=False, shares_cores=False)

    def wait(self) -> str:
        """See :meth:`RolloutEngine.wait`."""
        import vllm

        size = self._core.facts
        cache = f"{size['blocks']} blocks of {size['block_size']} tokens"
        return f"vLLM {vllm.__version__} inside the trainer's process in {self._dtype}, cache of {cache}"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_weights`."""
        with _preserved_random_state():
            self._core.load(self._sender.write(self._converted(parameters)), version)

    def request(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """See :meth:`RolloutEngine.request`."""
        completions: dict[int, Completion] = {}
        with _preserved_random_state():
            requests = as_requests(prompts, sampling, seeds)
            self._core.add([{**request, "id": str(index)} for index, request in enumerate(requests)])
            while self._core.busy:
                completions |= {int(message["id"]): as_completion(message) for message in self._core.step()}
        return finished(completions[index] for index in range(len(prompts)))

    def _first_lost(self) -> str | None:
        with _preserved_random_state():
            return cast("str | None", self._core.first_lost(self._sender.message))

    def close(self) -> None:
        """Free the engine."""
        self._core = None
        super().close()


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
