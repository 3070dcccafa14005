"""Plan of a run: whether it fits, its largest term, and the smallest number of GPUs that it fits on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_rlhf.expected_errors import UsageError, counted
from lightning_rlhf.extras.plan import memory as memory_
from lightning_rlhf.extras.plan.setup import NODE_GPUS, Run, strategy
from lightning_rlhf.extras.plan.traffic import traffic

GIB = 2**30
# Remedies for a term that is too large.
_REMEDIES = {
    memory_.PARAMETERS: "shard them (rlhf_fsdp, rlhf_deepspeed_stage_3), or train LoRA adapters",
    memory_.GRADIENTS: "shard them (rlhf_deepspeed_stage_2 or _3, rlhf_fsdp with reduce_every_micro_batch)",
    memory_.OPTIMIZER: "shard it (rlhf_deepspeed_stage_1 to _3, rlhf_fsdp), or offload it",
    memory_.GATHERED: "use a smaller vocabulary or narrower layers; more GPUs do not reduce it",
    memory_.ACTIVATIONS: "set activation_checkpointing if the strategy has it, or lower micro_batch_tokens",
    memory_.LOGITS: "lower micro_batch_tokens",
    memory_.STEP: "shard the optimizer's state, or offload it",
    memory_.ENGINE: "raise the engine's tensor_parallel_size, or use separate GPUs for it",
    memory_.ENGINE_PASS: "lower max_num_batched_tokens and max_num_seqs in the engine's arguments",
    memory_.CACHE: "lower the engine's gpu_memory_utilization",
    memory_.RUNTIME: "use larger GPUs",
}
# The same under a strategy that already shards weights, gradients and optimizer state.
_REMEDIES_IF_SHARDED = {
    memory_.PARAMETERS: "{shard}, offload them, or train LoRA adapters",
    memory_.GRADIENTS: "{shard}, reduce_every_micro_batch: true with rlhf_fsdp, or train LoRA adapters",
    memory_.OPTIMIZER: "{shard}, offload it (rlhf_fsdp_offload, rlhf_deepspeed_stage_3_offload), or train LoRA "
    "adapters",
    memory_.STEP: "{shard}, offload the optimizer's state, or train LoRA adapters",
}


@dataclass(frozen=True)
class Plan:
    """Memory and communication of a run on a number of GPUs.

    Args:
        run: run that was planned.
        gpus: number of GPUs.
        memory: bytes of a GPU at its peak, by term.
        host: bytes of host memory per GPU, by term.
        peak: moment at which the GPU's memory peaks.
        traffic: bytes that a GPU sends in a step, by term.
        gpus_per_node: number of GPUs of a node.
    """

    run: Run
    gpus: int
    memory: Counter[str]
    host: Counter[str]
    peak: str
    traffic: Counter[str]
    gpus_per_node: int = NODE_GPUS

    @property
    def total(self) -> int:
        """Bytes of a GPU at its peak."""
        return self.memory.total()

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory of a GPU."""
        return self.total <= self.run.capacity

    @property
    def largest_term(self) -> str:
        """Term with the most bytes."""
        return max(self.memory, key=lambda term: self.memory[term])

    @property
    def cached_texts(self) -> int:
        """Number of longest texts that fit into the engine's cache; 0 without an engine."""
        if self.run.engine is None:
            return 0
        run, engine = self.run, self.run.engine
        text = memory_.cache_bytes(engine, run.actor) * run.work.longest
        return memory_.engine_bytes(engine, run.actor, run.work, run.capacity)[memory_.CACHE] // text


def plan(run: Run, gpus: int) -> Plan:
    """Plan a run on a number of GPUs, eight in each node if the strategy has no other number.

    Raises:
        ValueError: strategy, engine or mini-batch cannot use this number.
    """
    if run.strategy.kind == "single" and gpus > 1:
        raise UsageError(f"rlhf_single runs on one GPU, got {gpus}: use rlhf_ddp, rlhf_fsdp or rlhf_deepspeed_stage_3")
    sizes = {
        run.strategy.splitting_options: run.strategy.splitting,
        "the engine's tensor_parallel_size": _engine_size(run),
    }
    for name, size in sizes.items():
        if gpus % size:
            raise UsageError(f"{name} {size} does not divide {gpus} GPUs; use a multiple of it")
    if run.work.minibatch_size < run.ranks(gpus):
        raise UsageError(
            f"a mini-batch of {run.work.minibatch_size} texts leaves some of {run.ranks(gpus)} ranks without a text: "
            f"make it larger, or use fewer GPUs"
        )
    gpu, host, peak = memory_.memory(run, gpus)
    return Plan(
        run,
        gpus,
        memory=gpu,
        host=host,
        peak=peak,
        traffic=traffic(run, gpus),
        gpus_per_node=min(gpus, run.strategy.node_gpus or NODE_GPUS),
    )


def smallest_gpu_count(run: Run) -> int | None:
    """Find the smallest number of GPUs that a run fits on.

    The number is doubled until the run fits, then every number down to half of it is tried. Only multiples of the
    tensor-parallel sizes are possible, and numbers of ranks that the shards of the weights divide.

    Returns:
        The number; None if the run fits on none up to one data-parallel rank per text of a mini-batch.
    """
    split = run.strategy.splitting
    step = math.lcm(split, _engine_size(run))
    most = 1 if run.strategy.kind == "single" else run.work.minibatch_size * split
    counts = [gpus for gpus in range(step, most + 1, step) if _can_shard(run, gpus)]
    high = 1
    while high < len(counts) and not plan(run, counts[high - 1]).fits:
        high *= 2
    return next((gpus for gpus in counts[high // 2 : high] if plan(run, gpus).fits), None)


def _can_shard(run: Run, gpus: int) -> bool:
    try:
        run.strategy.replicas(run.ranks(gpus))
    except UsageError:
        return False
    return True


def first_changes(run: Run, gpus: int) -> tuple[list[str], Plan] | None:
    """Find settings with which a run fits on a number of GPUs, those with the least cost in time first.

    Returns:
        The settings and the plan with them; None if they do not suffice.
    """
    settings: list[str] = []
    for text, changed in _changes(run, gpus):
        try:
            result = plan(changed(run), gpus)
        except UsageError:
            continue
        if result.total > 0.99 * plan(run, gpus).total:
            continue
        run = result.run
        settings = [each for each in settings if each.partition(":")[0] != text.partition(":")[0]] + [text]
        if result.fits:
            return settings, result
    return None


def _changes(run: Run, gpus: int) -> Iterator[tuple[str, Callable[[Run], Run]]]:
    """Yield settings that need less memory, each with the function that changes a run accordingly."""

    def of_strategy(**fields: Any) -> Callable[[Run], Run]:
        return lambda run: replace(run, strategy=replace(run.strategy, **fields))

    def of_fsdp(**fields: Any) -> Callable[[Run], Run]:
        def change(run: Run) -> Run:
            changed = of_strategy(**fields)(run)
            is_possible = "sequence_parallel_size" not in fields or all(
                role.model.sequence_parallel and role.model.layers[0].heads % changed.strategy.splitting == 0
                for role in run.roles
            )
            if run.strategy.kind != "fsdp" or not is_possible:
                raise UsageError("this strategy, or a model, does not have the option")
            return changed

        return change

    def of_work(tokens: int) -> Callable[[Run], Run]:
        return lambda run: replace(run, work=replace(run.work, micro_batch_tokens=tokens))

    before = run.strategy
    if before.kind in ("single", "ddp"):
        sharded = strategy("rlhf_fsdp", checkpointing=before.checkpointing)
        yield "strategy: rlhf_fsdp", lambda run: replace(run, strategy=sharded)
    yield "reduce_every_micro_batch: true", of_fsdp(reduce_every=True)
    yield "activation_checkpointing: true", of_strategy(checkpointing=True)
    yield (
        "activation_checkpointing and activation_offload: true",
        of_strategy(checkpointing=True, activation_offload=True),
    )
    tokens = run.work.micro_batch_tokens
    while tokens >= 2 * run.work.row_tokens:
        tokens //= 2
        yield f"micro_batch_tokens: {tokens}", of_work(tokens)
    for size in (2, 4, 8):
        yield f"sequence_parallel_size: {size}", of_fsdp(sequence_parallel_size=size)
    ranks = gpus // before.tensor_parallel_size
    for size in sorted({max(ranks // replicas, 1) for replicas in (8, 4, 2, 1)}):
        yield f"shard_size: {size}", of_fsdp(shard_size=size)
    yield "cpu_offload: true", of_fsdp(offload_optimizer=True, offload_params=True)


def misfit_message(plan: Plan) -> str:
    """Describe in one line the memory that is needed, its largest term, and the changes that would suffice."""
    run = plan.run
    term = plan.largest_term
    remedy = _REMEDIES[term]
    if run.strategy.shards_weights:
        has_replicas = run.strategy.replicas(run.ranks(plan.gpus)) > 1  # more GPUs would only add some
        remedy = _REMEDIES_IF_SHARDED.get(term, remedy)
        remedy = remedy.format(shard="use a larger shard_size" if has_replicas else "use more GPUs")
    enough = smallest_gpu_count(run)
    together = replace(run, strategy=replace(run.strategy, node_gpus=None))  # weights are sharded over all nodes
    if enough:
        advice = f"the smallest number of GPUs that it fits on is {enough}"
    elif run.strategy.shard_size is None and (enough := smallest_gpu_count(together)):
        shards = enough // run.strategy.splitting
        advice = f"the smallest number of GPUs that it fits on is {enough}, with shard_size: {shards}"
    elif run.strategy.shards_weights:
        advice = f"it fits on no number of such GPUs that a minibatch_size of {run.work.minibatch_size} texts can use"
    else:
        advice = "it fits on no number of such GPUs"
    changes = first_changes(run, plan.gpus)
    first = ""
    if changes is not None:
        settings, changed = changes
        first = f"change first: {', '.join(settings)}, with which each needs {changed.total / GIB:.1f} GiB; "
    return (
        f"does not fit on {counted(plan.gpus, 'GPU')} of {run.capacity / GIB:g} GiB: each would need "
        f"{plan.total / GIB:.1f} GiB, the largest part of it {plan.memory[term] / GIB:.1f} GiB for {term} ({remedy}); "
        f"{first}with {run.strategy.name}, {advice}"
    )


def _engine_size(run: Run) -> int:
    if run.engine is None:
        return 1
    return run.engine.tensor_parallel_size
