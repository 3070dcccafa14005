"""Bytes that one GPU sends in a step, by term."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from lightning_rlhf.extras.plan import partition
from lightning_rlhf.extras.plan.memory import Shard
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Work

FORWARD = "weights gathered, forward"
BACKWARD = "weights gathered, backward"
SUMS = "gradients summed"
REPLICAS = "gradients summed, replicas"
UPDATED = "updated weights shared"
TENSORS = "tensor-parallel sums"
HEADS = "tokens exchanged for heads"
PUSH = "weights gathered for the engine"
ENGINE = "weights copied to the engine"
TERMS = (FORWARD, BACKWARD, SUMS, REPLICAS, UPDATED, TENSORS, HEADS, PUSH, ENGINE)


def all_gather(total: int, ranks: int) -> int:
    """Compute the bytes that each rank sends in an all-gather or a reduce-scatter: total (N - 1) / N, on a ring.

    "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", Patarasuk and Yuan 2009; used for ZeRO by
    Rajbhandari et al. 2020, section 7.

    Args:
        total: bytes of the whole tensor.
        ranks: number N of ranks.
    """
    return total * (ranks - 1) // ranks


def all_reduce(total: int, ranks: int) -> int:
    """Compute the bytes that each rank sends in an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * all_gather(total, ranks)


def traffic(run: Run, gpus: int) -> Counter[str]:
    """Compute the bytes that one GPU sends for a rollout, its evaluation by all roles, and its updates.

    With E rounds of updates of M micro-batches each, A micro-batches without a backward pass, ring volumes
    R(x) = x (N - 1) / N, and c, s, w bytes per element in compute, in sums, at rest:

        rlhf_ddp       trained   E 2 R(w T)
        ZeRO-1         trained   E (R or 2 R (4 T) + R(c T))
        ZeRO-2         trained   E M R(c T) + E R(c T)
        ZeRO-3         trained   (A + 2 E M) R(c P) + E M R(c T)
        rlhf_fsdp      trained   (A + 2 E M) R(c P) - E M R(c r) + E R(s T), or E M R(s T) with reduce_every_micro_batch
                                 and, with N ranks of a shard_size and K replicas, E 2 (s T / N) (K - 1) / K
        both           frozen    A R(c P)
        tensors        2 sums of c tokens h per layer and pass, 7 with a backward pass, 8 with checkpointing
        heads          R(c tokens (a + k + v + o)) per layer and pass, 2 with a backward pass, 3 with checkpointing

    where r are the elements outside the layers, which FSDP keeps between the passes (all with reshard_after_forward:
    false, none with true), and a, k, v, o the widths of all heads' queries, keys, values and outputs. See Rajbhandari
    et al. 2020, section 7; for tensors, Korthikanti et al. 2022, section 4.2; for heads, Jacobs et al. 2023, section
    3.2. The padding of shards is sent too and is counted;
    gradient norms, metrics and scores are not.

    Args:
        run: run to plan.
        gpus: number of GPUs.
    """
    ranks = run.ranks(gpus)
    sent = Counter[str]()
    for role in run.roles:
        shard = Shard.of(role, run, ranks)
        passes = counts(role, run.work, ranks)
        sent += _weights(shard, passes)
        if role.trained:
            sent += _gradients(shard, passes)
        sent[TENSORS] += _tensors(shard, passes, run.work)
        sent[HEADS] += _heads(shard, passes, run.work)
        if role.name == "actor" and run.engine is not None:
            pushed = run.engine.pushed_bytes(role)
            if run.strategy.shards_weights:
                size = _gathered_bytes(shard, run.engine) * _padded_elements(shard) * run.strategy.tensor_parallel_size
                sent[PUSH] += all_gather(pushed if run.engine.gets_adapters else size, gpus // shard.replicas)
            sent[ENGINE] += pushed // run.engine.tensor_parallel_size
    return +sent


@dataclass(frozen=True)
class PassCounts:
    """Numbers of a role's passes in a step, of the rank with most rows.

    Args:
        evaluations: micro-batches without a backward pass.
        trained: micro-batches with a backward pass.
        updates: optimizer steps.
        evaluated_rows: rows of all ``evaluations``; a row counts in each of its passes.
        trained_rows: rows of all ``trained``.
    """

    evaluations: int
    trained: int
    updates: int
    evaluated_rows: int
    trained_rows: int


def counts(role: Role, work: Work, ranks: int) -> PassCounts:
    """Count the passes of a role in a step."""
    is_evaluated = {"actor": work.evaluates_old, "critic": True}.get(role.name, not role.trained)
    evaluations = is_evaluated + role.is_reference_too
    if work.evaluates_mismatched:
        evaluations += 1 + role.is_reference_too
    rows, minibatch_rows = math.ceil(work.responses / ranks), math.ceil(work.minibatch_size / ranks)
    batches, of_minibatch = (work.micro_batches(texts, ranks) for texts in (work.responses, work.minibatch_size))
    if role.is_teacher and work.teachers_in_updates:
        return PassCounts(work.updates * of_minibatch, 0, 0, work.updates * minibatch_rows, 0)
    reused = reused_rows = 0
    if role.name == "actor" and work.evaluates_old and work.reuses_first:
        rest = max(0, work.responses - work.minibatch_size)
        reused, reused_rows = batches - work.micro_batches(rest, ranks), rows - math.ceil(rest / ranks)
    updates = work.updates if role.trained else 0
    return PassCounts(
        evaluations=evaluations * batches - reused,
        trained=updates * of_minibatch,
        updates=updates,
        evaluated_rows=evaluations * rows - reused_rows,
        trained_rows=updates * minibatch_rows,
    )


def _gathered_bytes(shard: Shard, engine: Engine) -> int:
    """Return the bytes per element gathered for the engine; FSDP casts before, unless it merges adapters."""
    weights = shard.precision.weights
    cast = shard.strategy.kind == "fsdp" and not shard.role.adapters
    if cast:
        return min(weights, engine.element_bytes(shard.role))
    return weights


def _weights(shard: Shard, counts: PassCounts) -> Counter[str]:
    """Compute the all-gathers of parameters."""
    if not shard.strategy.shards_weights:
        return Counter()
    whole = shard.precision.compute * _padded_elements(shard)
    outside = 0  # bytes of parameters outside the layers, which FSDP keeps for the backward pass
    if shard.strategy.reshards is False:
        outside = whole
    elif shard.strategy.kind == "fsdp" and shard.strategy.reshards is None:
        parameters = shard.role.model.units[None]
        elements = partition.fsdp_elements(parameters, shard.ranks, shard.strategy.tensor_parallel_size)
        outside = shard.precision.compute * shard.ranks * elements
    return Counter(
        {
            FORWARD: (counts.evaluations + counts.trained) * all_gather(whole, shard.ranks),
            BACKWARD: counts.trained * all_gather(whole - outside, shard.ranks),
        }
    )


def _gradients(shard: Shard, counts: PassCounts) -> Counter[str]:
    """Compute the sums of a trained role's gradients over ranks, and the exchange of updated weights."""
    strategy, precision = shard.strategy, shard.precision
    whole = shard.role.adapters or shard.role.model.elements
    if strategy.kind == "fsdp":
        reductions = counts.trained if strategy.reduce_every else counts.updates
        part = precision.reduce * shard.trained_elements
        between = counts.updates * all_reduce(part, shard.replicas)
        return Counter({SUMS: reductions * all_gather(shard.ranks * part, shard.ranks), REPLICAS: between})
    if strategy.kind != "zero":
        return Counter({SUMS: counts.updates * all_reduce(precision.reduce * whole, shard.ranks)})
    part = all_gather(whole, shard.ranks)
    if strategy.stage == 1:  # next to bfloat16 weights, float32 gradients are summed on every rank
        has_float32_copy = precision.weights == 2 and not strategy.offload_optimizer
        sums = counts.updates * (2 * 4 if has_float32_copy else precision.weights) * part
    else:
        sums = counts.trained * precision.compute * part
    if strategy.stage == 3:
        return Counter({SUMS: sums})
    return Counter({SUMS: sums, UPDATED: counts.updates * precision.compute * part})


def _tensors(shard: Shard, counts: PassCounts, work: Work) -> int:
    """Compute the all-reduces of split layers: outputs in the forward pass, gradients of inputs in the backward.

    Megatron sums once for all projections of one input; torch's ColwiseParallel sums for each of query, key, value,
    gate and up, five sums per backward pass and layer. Recomputation of a layer stops before its last sum.
    """
    model = shard.role.model
    forward = 2
    backward = 6 if shard.strategy.checkpointing else 5
    rows = forward * counts.evaluated_rows + (forward + backward) * counts.trained_rows
    row = shard.precision.compute * model.hidden * work.row_tokens * len(model.layers)
    return all_reduce(row * rows // shard.strategy.sequence_parallel_size, shard.strategy.tensor_parallel_size)


def _heads(shard: Shard, counts: PassCounts, work: Work) -> int:
    """Compute the exchanges of tokens for heads around the attention of divided rows.

    A rank sends all but its part of its tokens' queries, keys, values and outputs. Keys are repeated where there are
    fewer heads of them than ranks.
    """
    strategy, model = shard.strategy, shard.role.model
    size, split = strategy.sequence_parallel_size, strategy.tensor_parallel_size
    rows = counts.evaluated_rows + (3 if strategy.checkpointing else 2) * counts.trained_rows
    widths = 0
    for layer in model.layers:
        if layer.latents:  # latent attention expands keys and values to all heads
            widths += 2 * layer.query + 2 * layer.output
            continue
        key_heads = layer.heads * layer.key // layer.query // split
        repeated = math.lcm(key_heads, size) // key_heads
        widths += 2 * layer.query + 2 * repeated * layer.key
    tokens = -(-rows * work.row_tokens // size)
    return all_gather(shard.precision.compute * tokens * widths // split, size)


def _padded_elements(shard: Shard) -> int:
    """Count the elements of all shards of one tensor-parallel rank together, padding included."""
    parameters = shard.role.model.parameters
    if shard.strategy.kind == "fsdp":
        return shard.ranks * partition.fsdp_elements(parameters, shard.ranks, shard.strategy.tensor_parallel_size)
    return shard.ranks * partition.zero3_elements(parameters, shard.ranks)
