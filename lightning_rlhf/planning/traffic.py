"""Bytes that one GPU sends in a step, by term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_rlhf.planning import partition
from lightning_rlhf.planning.memory import elements
from lightning_rlhf.planning.setup import Engine, Precision, Role, Strategy, Work, precision

FORWARD, BACKWARD = "weights gathered, forward", "weights gathered, backward"
SUMS, UPDATED = "gradients summed", "updated weights shared"
TENSORS, PUSH, ENGINE = "tensor-parallel sums", "weights gathered for the engine", "weights copied to the engine"
TERMS = (FORWARD, BACKWARD, SUMS, UPDATED, TENSORS, PUSH, ENGINE)


def all_gather(total: int, ranks: int) -> int:
    """Bytes that each rank sends so that all have what each had a part of; a reduce-scatter costs the same.

    total (N - 1) / N, on a ring: "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", Patarasuk and
    Yuan 2009; used for ZeRO by Rajbhandari et al. 2020, section 7.

    Args:
        total: bytes of all parts together.
        ranks: N.
    """
    return total * (ranks - 1) // ranks


def all_reduce(total: int, ranks: int) -> int:
    """Bytes that each rank sends so that all have the sum: a reduce-scatter and an all-gather, 2 total (N - 1) / N."""
    return 2 * all_gather(total, ranks)


def traffic(roles: Sequence[Role], strategy: Strategy, work: Work, engine: Engine | None, gpus: int) -> Counter[str]:
    """Bytes that one GPU sends in one step: a rollout, what all roles say of it, and all updates made of it.

    With E rounds of updates of M micro-batches each, A micro-batches in which roles are only asked, ring volumes
    R(x) = x (N - 1) / N, and c, s, w bytes of a number in compute, in sums, at rest:

        rlhf_ddp       trained   E 2 R(w T)
        ZeRO-1         trained   E (R or 2 R (4 T) + R(c T))
        ZeRO-2         trained   E M R(c T) + E R(c T)
        ZeRO-3         trained   (A + 2 E M) R(c P) + E M R(c T)
        rlhf_fsdp      trained   (A + 2 E M) R(c P) - E M R(c r) + E R(s T), or E M R(s T) with reduce_every_micro_batch
        both           frozen    A R(c P)
        tensors        2 sums of c tokens h per layer and pass, 7 with a backward pass, 8 with checkpointing

    where r is what lies outside of the layers, which FSDP keeps between the passes. See Rajbhandari et al. 2020,
    section 7; for tensors, Korthikanti et al. 2022, section 4.2. Padding of shards is sent too and is counted. What
    norms and metrics exchange is not.

    Args:
        roles: of the run.
        strategy: how they lie.
        work: of a step.
        engine: which gets the actor's weights once a step; None if it is elsewhere.
        gpus: in all.
    """
    ranks = gpus // strategy.tensor_parallel_size
    sent: Counter[str] = Counter()
    for role in roles:
        numbers = precision(strategy, role.dtype, work.mixed)
        asked_before = work.asks_old if role.name == "actor" else not role.trained or role.name == "critic"
        times = asked_before + role.is_reference_too
        times += work.asks_mismatched * (1 + role.is_reference_too)
        asked = times * work.micro_batches(work.responses, ranks)
        updates = work.update_epochs * -(-work.responses // work.minibatch_size) * role.trained
        learnt = updates * work.micro_batches(work.minibatch_size, ranks)
        sent += _weights(role, strategy, numbers, ranks, asked, learnt)
        if role.trained:
            sent += _gradients(role, strategy, numbers, ranks, updates, learnt)
        sent[TENSORS] += _tensors(role, strategy, numbers, work, asked, learnt, ranks)
        if role.name == "actor" and engine is not None:
            if strategy.shards_weights:
                size = numbers.weights * _padded(role, strategy, ranks) * strategy.tensor_parallel_size
                sent[PUSH] += all_gather(size, gpus)
            sent[ENGINE] += engine.number(role) * role.model.elements // engine.tensor_parallel_size
    return +sent


def _weights(role: Role, strategy: Strategy, numbers: Precision, ranks: int, asked: int, learnt: int) -> Counter[str]:
    """All-gathers of a role's parameters, in the passes that need them."""
    if not strategy.shards_weights:
        return Counter()
    whole = numbers.compute * _padded(role, strategy, ranks)
    kept = 0
    if strategy.kind == "fsdp":
        outside = role.model.units[None]
        kept = numbers.compute * ranks * partition.fsdp_elements(outside, ranks, strategy.tensor_parallel_size)
    return Counter(
        {
            FORWARD: (asked + learnt) * all_gather(whole, ranks),
            BACKWARD: learnt * all_gather(whole - kept, ranks),
        }
    )


def _gradients(
    role: Role, strategy: Strategy, numbers: Precision, ranks: int, updates: int, learnt: int
) -> Counter[str]:
    """Sums of a trained role's gradients over ranks, and what is sent of its updated weights."""
    whole = role.adapters or role.model.elements
    if strategy.kind == "fsdp":
        shard = elements(role, strategy, ranks)[1]
        times = learnt if strategy.reduce_every else updates
        return Counter({SUMS: times * all_gather(numbers.reduce * ranks * shard, ranks)})
    if strategy.kind != "zero":
        return Counter({SUMS: updates * all_reduce(numbers.reduce * whole, ranks)})
    part = all_gather(whole, ranks)
    if strategy.stage == 3:
        return Counter({SUMS: learnt * numbers.compute * part})
    sums = learnt * numbers.compute * part
    if strategy.stage == 1:  # bfloat16 weights have float32 gradients beside them, which are summed on every rank
        sums = updates * (2 * 4 if numbers.weights == 2 and not strategy.offload_optimizer else numbers.weights) * part
    return Counter({SUMS: sums, UPDATED: updates * numbers.compute * part})


def _tensors(
    role: Role, strategy: Strategy, numbers: Precision, work: Work, asked: int, learnt: int, ranks: int
) -> int:
    """All-reduces of layers whose matrices are split: of what leaves attention and MLP, and backwards of what enters.

    Megatron sums once for all projections that read one input; torch's ColwiseParallel sums for each of query, key,
    value, gate and up, which makes five sums in a backward pass, not two. Computing a layer again stops before its
    last sum.
    """
    texts = work.minibatch_size if role.trained else work.responses
    one = numbers.compute * role.model.hidden * work.row_tokens * len(role.model.layers)
    forward, backward = 2, 6 if strategy.checkpointing else 5
    rows = forward * asked * work.micro_batch_rows(work.responses, ranks)
    rows += (forward + backward) * learnt * work.micro_batch_rows(texts, ranks)
    return all_reduce(one * rows, strategy.tensor_parallel_size)


def _padded(role: Role, strategy: Strategy, ranks: int) -> int:
    """Numbers of all shards of one tensor-parallel rank together, padding included."""
    if strategy.kind == "fsdp":
        return ranks * partition.fsdp_elements(role.model.parameters, ranks, strategy.tensor_parallel_size)
    return ranks * partition.zero3_elements(role.model.parameters, ranks)
