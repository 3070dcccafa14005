"""Bytes that one GPU sends in a step, by term."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_rlhf.planning import partition
from lightning_rlhf.planning.memory import Shard
from lightning_rlhf.planning.setup import Role, Run

FORWARD = "weights gathered, forward"
BACKWARD = "weights gathered, backward"
SUMS = "gradients summed"
UPDATED = "updated weights shared"
TENSORS = "tensor-parallel sums"
PUSH = "weights gathered for the engine"
ENGINE = "weights copied to the engine"
TERMS = (FORWARD, BACKWARD, SUMS, UPDATED, TENSORS, PUSH, ENGINE)


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
        both           frozen    A R(c P)
        tensors        2 sums of c tokens h per layer and pass, 7 with a backward pass, 8 with checkpointing

    where r are the elements outside the layers, which FSDP keeps between the passes. See Rajbhandari et al. 2020,
    section 7; for tensors, Korthikanti et al. 2022, section 4.2. The padding of shards is sent too and is counted;
    gradient norms and metrics are not.

    Args:
        run: run to plan.
        gpus: number of GPUs.
    """
    ranks = run.ranks(gpus)
    sent = Counter[str]()
    for role in run.roles:
        exchange = _Exchange(role, run, ranks)
        sent += exchange.weights()
        sent += exchange.gradients()
        sent[TENSORS] += exchange.tensors()
        if role.name == "actor" and run.engine is not None:
            if run.strategy.shards_weights:
                size = exchange.shard.precision.weights * exchange.padded * run.strategy.tensor_parallel_size
                sent[PUSH] += all_gather(size, gpus)
            sent[ENGINE] += run.engine.element_bytes(role) * role.model.elements // run.engine.tensor_parallel_size
    return +sent


@dataclass(frozen=True)
class _Exchange:
    """Communication of one role in a step.

    Args:
        role: the model.
        run: run to plan.
        ranks: number of data-parallel ranks.
    """

    role: Role
    run: Run
    ranks: int

    @property
    def shard(self) -> Shard:
        return Shard(self.role, self.run.strategy, self.ranks, self.run.work.mixed)

    @property
    def evaluations(self) -> int:
        """Micro-batches without a backward pass."""
        role, work = self.role, self.run.work
        evaluates = {"actor": work.evaluates_old, "critic": True}
        passes = int(evaluates.get(role.name, not role.trained))
        passes += role.is_reference_too
        if work.evaluates_mismatched:
            passes += 1 + role.is_reference_too
        return passes * work.micro_batches(work.responses, self.ranks)

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        work = self.run.work
        minibatches = -(-work.responses // work.minibatch_size)
        return work.update_epochs * minibatches if self.role.trained else 0

    @property
    def trained_micro_batches(self) -> int:
        """Micro-batches with a backward pass."""
        return self.updates * self.run.work.micro_batches(self.run.work.minibatch_size, self.ranks)

    @property
    def padded(self) -> int:
        """Elements of all shards of one tensor-parallel rank together, padding included."""
        parameters = self.role.model.parameters
        if self.run.strategy.kind == "fsdp":
            split = self.run.strategy.tensor_parallel_size
            return self.ranks * partition.fsdp_elements(parameters, self.ranks, split)
        return self.ranks * partition.zero3_elements(parameters, self.ranks)

    def weights(self) -> Counter[str]:
        """Compute the all-gathers of parameters."""
        strategy, compute = self.run.strategy, self.shard.precision.compute
        if not strategy.shards_weights:
            return Counter()
        whole = compute * self.padded
        outside = 0
        if strategy.kind == "fsdp":
            split = strategy.tensor_parallel_size
            outside = compute * self.ranks * partition.fsdp_elements(self.role.model.units[None], self.ranks, split)
        forward = self.evaluations + self.trained_micro_batches
        return Counter(
            {
                FORWARD: forward * all_gather(whole, self.ranks),
                BACKWARD: self.trained_micro_batches * all_gather(whole - outside, self.ranks),
            }
        )

    def gradients(self) -> Counter[str]:
        """Compute the sums of gradients over ranks, and the exchange of updated weights."""
        strategy = self.run.strategy
        precision = self.shard.precision
        whole = self.role.adapters or self.role.model.elements
        if not self.role.trained:
            return Counter()
        if strategy.kind == "fsdp":
            reductions = self.trained_micro_batches if strategy.reduce_every else self.updates
            size = precision.reduce * self.ranks * self.shard.trained_elements
            return Counter({SUMS: reductions * all_gather(size, self.ranks)})
        if strategy.kind != "zero":
            return Counter({SUMS: self.updates * all_reduce(precision.reduce * whole, self.ranks)})
        part = all_gather(whole, self.ranks)
        if strategy.stage == 1:  # next to bfloat16 weights, float32 gradients are summed on every rank
            has_float32_copy = precision.weights == 2 and not strategy.offload_optimizer
            sums = self.updates * (2 * 4 if has_float32_copy else precision.weights) * part
        else:
            sums = self.trained_micro_batches * precision.compute * part
        if strategy.stage == 3:
            return Counter({SUMS: sums})
        return Counter({SUMS: sums, UPDATED: self.updates * precision.compute * part})

    def tensors(self) -> int:
        """Compute the all-reduces of split layers: outputs in the forward pass, gradients of inputs in the backward.

        Megatron sums once for all projections of one input; torch's ColwiseParallel sums for each of query, key, value,
        gate and up, five sums per backward pass and layer. Recomputation of a layer stops before its last sum.
        """
        work = self.run.work
        texts = work.minibatch_size if self.role.trained else work.responses
        forward = 2
        backward = 6 if self.run.strategy.checkpointing else 5
        rows = forward * self.evaluations * work.micro_batch_rows(work.responses, self.ranks)
        rows += (forward + backward) * self.trained_micro_batches * work.micro_batch_rows(texts, self.ranks)
        model = self.role.model
        row = self.shard.precision.compute * model.hidden * work.row_tokens * len(model.layers)
        return all_reduce(row * rows, self.run.strategy.tensor_parallel_size)
