"""The plan: does it fit, what is the largest term, how many GPUs would do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_rlhf.planning import memory as memory_
from lightning_rlhf.planning.setup import Engine, Role, Strategy, Work
from lightning_rlhf.planning.traffic import traffic

GIB = 2**30
# What a user can do about a term that is too large.
_REMEDIES = {
    memory_.PARAMETERS: "shard them (rlhf_fsdp, rlhf_deepspeed_stage_3), or train LoRA adapters",
    memory_.GRADIENTS: "shard them (rlhf_deepspeed_stage_2 or _3, rlhf_fsdp with reduce_every_micro_batch)",
    memory_.OPTIMIZER: "shard it (rlhf_deepspeed_stage_1 to _3, rlhf_fsdp), or offload it",
    memory_.GATHERED: "a smaller vocabulary or narrower layers would shrink it, more GPUs do not",
    memory_.ACTIVATIONS: "turn activation_checkpointing on where the strategy has it, or lower micro_batch_tokens",
    memory_.LOGITS: "lower micro_batch_tokens",
    memory_.STEP: "shard the optimizer's state, or offload it",
    memory_.ENGINE: "raise the engine's tensor_parallel_size, or give it GPUs of its own",
    memory_.CACHE: "lower the engine's gpu_memory_utilization",
    memory_.RUNTIME: "take larger GPUs",
}
# The same for a strategy that shards weights, gradients and the optimizer's state already.
_WHERE_SHARDED = {
    memory_.PARAMETERS: "use more GPUs, offload them, or train LoRA adapters",
    memory_.GRADIENTS: "use more GPUs, reduce_every_micro_batch: true with rlhf_fsdp, or train LoRA adapters",
    memory_.OPTIMIZER: "use more GPUs, offload it (rlhf_fsdp_offload, rlhf_deepspeed_stage_3_offload), or train LoRA "
    "adapters",
    memory_.STEP: "use more GPUs, offload the optimizer's state, or train LoRA adapters",
}


@dataclass(frozen=True)
class Run:
    """What is planned.

    Args:
        roles: the models, the actor among them.
        strategy: how they lie over GPUs.
        work: of a step.
        engine: on the same GPUs; None if there is none or it is elsewhere.
        capacity: bytes of a GPU.
        background_save: whether checkpoints are written from a copy in the host's memory while training goes on.
    """

    roles: Sequence[Role]
    strategy: Strategy
    work: Work
    engine: Engine | None
    capacity: int
    background_save: bool = True


@dataclass(frozen=True)
class Plan:
    """What a run takes on a number of GPUs.

    Args:
        run: what is planned.
        gpus: in all.
        memory: bytes of a GPU at its fullest moment, by term.
        host: bytes of the host's memory for each GPU, by term.
        fullest: which moment that is.
        traffic: bytes that a GPU sends in a step, by term.
    """

    run: Run
    gpus: int
    memory: Counter[str]
    host: Counter[str]
    fullest: str
    traffic: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes of a GPU."""
        return self.memory.total()

    @property
    def fits(self) -> bool:
        """Whether they are there, and the engine's share holds its weights and one text."""
        return self.total <= self.run.capacity

    @property
    def largest(self) -> str:
        """The largest term."""
        return max(self.memory, key=lambda term: self.memory[term])

    @property
    def cached_texts(self) -> int:
        """Texts of the greatest length that the engine's cache holds; 0 without an engine."""
        if self.run.engine is None:
            return 0
        actor = next(role for role in self.run.roles if role.name == "actor")
        one = memory_.cache_bytes(self.run.engine, actor) * self.run.work.longest
        return self.memory[memory_.CACHE] // one


def plan(run: Run, gpus: int) -> Plan:
    """What a run takes on that many GPUs.

    Raises:
        ValueError: the strategy or the engine does not run on that many.
    """
    split = run.strategy.tensor_parallel_size
    if run.strategy.kind == "single" and gpus > 1:
        raise ValueError(f"rlhf_single runs on one GPU, got {gpus}: take rlhf_ddp, rlhf_fsdp or rlhf_deepspeed_stage_3")
    for size, what in ((split, "tensor_parallel_size"), (_engine_size(run), "the engine's tensor_parallel_size")):
        if gpus % size:
            raise ValueError(f"{what} {size} does not divide {gpus} GPUs; take a multiple of it")
    if run.work.minibatch_size < gpus // split:
        raise ValueError(
            f"a mini-batch of {run.work.minibatch_size} texts leaves some of {gpus // split} ranks without one: "
            f"make it larger, or take fewer GPUs"
        )
    used, host, fullest = memory_.memory(
        run.roles, run.strategy, run.work, run.engine, gpus, run.capacity, run.background_save
    )
    return Plan(run, gpus, used, host, fullest, traffic(run.roles, run.strategy, run.work, run.engine, gpus))


def smallest(run: Run) -> int | None:
    """Find the smallest number of GPUs that a run fits on.

    Doublings find a number that fits, then every count between it and its half is tried: only multiples of the tensor
    parallel sizes can run.

    Returns:
        The number; None if the run fits on none up to a rank for each text of a mini-batch.
    """
    split = run.strategy.tensor_parallel_size
    step = math.lcm(split, _engine_size(run))
    most = 1 if run.strategy.kind == "single" else run.work.minibatch_size * split
    counts = range(step, most + 1, step)
    high = 1
    while high < len(counts) and not plan(run, counts[high - 1]).fits:
        high *= 2
    return next((gpus for gpus in counts[high // 2 : high] if plan(run, gpus).fits), None)


def refusal(found: Plan) -> str:
    """One sentence on a plan that does not fit: how much too much, the largest term, how many GPUs would do."""
    run, largest = found.run, found.largest
    enough = smallest(run)
    remedy = _REMEDIES[largest]
    if run.strategy.shards_weights:
        remedy = _WHERE_SHARDED.get(largest, remedy)
    many = f"{found.gpus} GPU{'s' if found.gpus > 1 else ''}"
    would = f"the smallest number that would do is {enough}" if enough else "no number of such GPUs would do"
    if not enough and run.strategy.shards_weights:
        would += f" that a minibatch_size of {run.work.minibatch_size} texts can use"
    return (
        f"does not fit on {many} of {run.capacity / GIB:g} GiB: each would need {found.total / GIB:.1f} GiB, most of "
        f"all for {largest}, {found.memory[largest] / GIB:.1f} GiB ({remedy}); "
        f"with {run.strategy.name}, {would}"
    )


def _engine_size(run: Run) -> int:
    return 1 if run.engine is None else run.engine.tensor_parallel_size
