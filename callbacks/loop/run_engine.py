"""The engine of a run, from its choice to its end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_rlhf.callbacks.loop.checks import tensor_ranks
from lightning_rlhf.callbacks.loop.rollout_settings import check_overlap
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.images import ImageStore
from lightning_rlhf.models.loading import ModelSource, save_architecture
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.choose import choose_engine
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine, divided_threads, engine_dtype, visible_gpu
from lightning_rlhf.rollout.gpu_memory import limit_gpu_memory
from lightning_rlhf.rollout.vllm.supervisor import remove_temporary_files
from lightning_rlhf.types import SamplingParams

log = logging.getLogger(__name__)


class RunEngine:
    """Chooses the engine of a run, and starts, awaits and closes it.

    Args:
        choice: engine of the configuration; ``auto`` chooses one.
        module: module with the actor.
        sampling: sampling parameters of the training responses.
        max_staleness: argument of RolloutLoop.

    Raises:
        ValueError: the engine does not support the sampling parameters or ``max_staleness``.
    """

    def __init__(
        self,
        choice: RolloutEngine | str,
        trainer: Trainer,
        module: RLHFModule,
        sampling: SamplingParams,
        max_staleness: int,
    ) -> None:
        self._source = module.sources["actor"]
        self._device = trainer.strategy.root_device
        self._dtype = engine_dtype(str(trainer.precision), self._source.dtype)
        longest = trainer.datamodule.max_tokens + sampling.max_tokens
        self.max_length = min(longest, max_positions(self._source.hf_config()) or longest)  # checked: all prompts fit
        reason = "chosen in the configuration"
        if isinstance(choice, str):
            config = self._source.hf_config()
            splitting = tensor_ranks(trainer, module)
            choice, reason = choose_engine(config, splitting, self._dtype, trainer.world_size, self.max_length)
        engine = choice
        log.info("Rollouts by %s: %s.", type(engine).__name__, reason)
        self.engine = engine
        self.matrix_dtype: torch.dtype = getattr(torch, engine.traits.matrix_dtype or self._dtype)
        self.description = ""
        self._threads: int | None = None  # of this process before the engine got some of them
        self._takes_turns = not max_staleness
        self._limits = sampling.limits
        self.uses_gpu = False
        engine.check(sampling)
        for callback in [each for each in trainer.callbacks if hasattr(each, "prepare_engine")]:
            callback.prepare_engine(engine, module)
        check_overlap(engine, max_staleness)
        self._directory = make_engine_directory(trainer, self._source)

    def start(self, trainer: Trainer) -> None:
        """Start the engine; on GPUs, wait for it before the models load. All ranks.

        vLLM measures the free memory of its GPU at two moments, so nothing else may use the GPU in between.
        """
        if getattr(trainer.datamodule, "image_store", None) is not None and not self.engine.traits.reads_images:
            raise UsageError(
                f"{type(self.engine).__name__} does not read images, and prompts or the environment have some: use "
                f"VLLMEngine, VLLMServerEngine or TransformersEngine"
            )
        own_threads, threads = divided_threads(torch.get_num_threads(), self._takes_turns)
        setup = EngineSetup(
            model=self._directory,
            dtype=self._dtype,
            max_tokens=self.max_length,
            log=self._directory.with_suffix(".log"),
            devices=visible_gpu(self._device),
            lora=self._source.lora,
            threads=threads,
            limits=self._limits,
            **image_settings(trainer),
        )
        self.engine.proven_gap = None  # of an earlier run
        self.engine.start(setup)
        if self.engine.traits.shares_cores:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(own_threads)
        self.uses_gpu = bool(setup.devices)
        if self.uses_gpu:
            self.wait()
            trainer.strategy.barrier("rollout engines")
            limit_gpu_memory(self._device, self.engine.traits.gpu_fraction)

    def wait(self) -> None:
        """Wait until the engine is ready."""
        self.description = self.description or self.engine.wait()

    def close(self) -> None:
        """Close the engine, and give its threads back to the trainer; may be called twice."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._threads = None
        self.engine.close()


def image_settings(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of :class:`EngineSetup` for images; empty if the data have none."""
    store: ImageStore | None = getattr(trainer.datamodule, "image_store", None)
    if store is None:
        return {}
    return {"processor": store.processor, "images_per_prompt": store.longest}


def make_engine_directory(trainer: Trainer, source: ModelSource) -> Path:
    """Return a directory with the actor's configuration for this rank's engine; remove files of ranks that are gone.

    Args:
        source: source of the actor.
    """
    directory = Path(trainer.default_root_dir) / "engine" / f"rank{trainer.global_rank}"
    save_architecture(source, directory)
    if trainer.is_global_zero:
        remove_temporary_files(directory.parent, trainer.world_size)
    return directory
