"""Host memory of a node, and lower bounds of the seconds of a push, of generation and of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_rlhf.extras.plan import memory, traffic
from lightning_rlhf.extras.plan.setup import Role, Run, Strategy

_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class Speeds:
    """Peak speeds of one GPU and its links, by default those in the data sheet of an H100 SXM.

    Args:
        arithmetic: FLOP/s in bfloat16 without sparsity.
        memory: bytes/s of the GPU's memory.
        bus: bytes/s between GPU and host, one direction.
        link: bytes/s between GPUs of a node, one direction.
        network: bytes/s of one GPU between nodes.
    """

    arithmetic: float = 989e12
    memory: float = 3.35e12
    bus: float = 64e9
    link: float = 450e9
    network: float = 50e9

    def __str__(self) -> str:
        return (
            f"{self.arithmetic / 1e12:.0f} TFLOP/s, memory {self.memory / 1e12:.2f} TB/s, host {self.bus / 1e9:.0f} "
            f"GB/s, NVLink {self.link / 1e9:.0f} GB/s, network {self.network / 1e9:.0f} GB/s for each GPU"
        )


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of the first node's host memory, without programs and page cache.

    Args:
        training: pushed weights, copies for checkpoints and offloaded tensors of all GPUs of the node.
        loading: the largest role while it is loaded, before the terms of ``training`` exist.
        exporting: whole weights of the first trained role that rank 0 gathers for an export.
    """

    training: int
    loading: int
    exporting: int

    @property
    def peak(self) -> int:
        """Most bytes at one time."""
        return max(self.training + self.exporting, self.loading)


def node_memory(run: Run, host: Counter[str], gpus_per_node: int) -> NodeMemory:
    """Compute the host memory of the first node.

    With FSDP and ZeRO, rank 0 loads a role whole and sends the others their parts. With ``rlhf_single`` and
    ``rlhf_ddp``, every rank loads the whole role, and the first one saves it. Weights are exported in the dtype of the
    parameters.

    Args:
        run: run to plan.
        host: bytes of host memory for each GPU, by term.
        gpus_per_node: number of GPUs of a node.
    """
    every_rank_is_whole = run.strategy.kind in ("single", "ddp")
    training = host.total() * gpus_per_node
    if every_rank_is_whole:  # `host` counts the copy for checkpoints once for each GPU, and only rank 0 has it
        training -= host[memory.SAVED] * (gpus_per_node - 1)
    largest = max(role.model.elements * _source_bytes(role, run.strategy) for role in run.roles)
    trained = next(role for role in run.roles if role.trained)
    return NodeMemory(
        training=training,
        loading=largest * (gpus_per_node if every_rank_is_whole else 1),
        exporting=trained.model.elements * _source_bytes(trained, run.strategy),
    )


def _source_bytes(role: Role, strategy: Strategy) -> int:
    """Return the bytes of a weight of a role as it is loaded.

    A trained role in bfloat16 is loaded in float32, its master weights, except under ZeRO, which makes them itself.
    """
    has_masters = role.has_master_weights and strategy.kind != "zero"
    return _FLOAT32_BYTES if role.dtype != "bfloat16" or has_masters else _BFLOAT16_BYTES


def push_seconds(run: Run, sent: Counter[str], gpus: int, gpus_per_node: int, speeds: Speeds) -> float:
    """Compute a lower bound of the seconds of a push: gather, copy to the host, and from there to each GPU.

    The first rank of an engine copies all weights to the host; each GPU of the engine copies its part back. The engine
    loads after the trainer has written.

    Args:
        run: run with an engine.
        sent: bytes that a GPU sends, by term.
        gpus: number of GPUs.
        gpus_per_node: number of GPUs of a node.
        speeds: speeds of a GPU and its links.
    """
    assert run.engine is not None
    weights = run.engine.pushed_bytes(run.actor)
    speed = _bytes_per_second(run, traffic.PUSH, gpus, gpus_per_node, speeds)
    part = weights // run.engine.tensor_parallel_size
    return sent[traffic.PUSH] / speed + (weights + part) / speeds.bus


def learning_seconds(
    run: Run, sent: Counter[str], gpus: int, gpus_per_node: int, speeds: Speeds
) -> tuple[float, float]:
    """Compute the least seconds of arithmetic and of communication while the module learns.

    All texts are taken to be the longest: a step of shorter ones is faster. The rows of a GPU count as whole
    micro-batches (10 rows in fours are 12). A forward pass has 2 FLOPs for each parameter that a token passes, and in
    attention 4 for each element of the query and each earlier token (scores and values), which on average are half of
    the text. A backward pass has twice the FLOPs of the forward pass, and checkpointing adds a forward pass. Arithmetic
    and communication can overlap, so that the larger bound applies to the step.

    Args:
        run: run to plan.
        sent: bytes that a GPU sends, by term.
        gpus: number of GPUs.
        gpus_per_node: number of GPUs of a node.
        speeds: speeds of a GPU and its links.
    """
    ranks, work = run.ranks(gpus), run.work
    operations = 0
    for role in run.roles:
        counts = traffic.counts(role, work, ranks)
        evaluated_rows = counts.evaluations * work.micro_batch_rows(work.responses, ranks)
        trained_rows = counts.trained * work.micro_batch_rows(work.minibatch_size, ranks)
        passes = evaluated_rows + (4 if run.strategy.checkpointing else 3) * trained_rows
        operations += passes * work.row_tokens * _forward_operations(role, work.longest)
    communication = sum(
        size / _bytes_per_second(run, term, gpus, gpus_per_node, speeds)
        for term, size in sent.items()
        if term not in (traffic.PUSH, traffic.ENGINE)  # not while the module learns
    )
    return operations / run.strategy.splitting / speeds.arithmetic, communication


def _bytes_per_second(run: Run, term: str, gpus: int, gpus_per_node: int, speeds: Speeds) -> float:
    """Return the bytes per second of the slowest link of a term, which is the network unless its group is in one node.

    ====================================================  ==========================================
    term                                                  GPUs that exchange it
    ====================================================  ==========================================
    ``TENSORS``, ``HEADS`` (tokens exchanged for heads)   those that split a layer, with neighbouring ranks
    ``REPLICAS``                                          all
    the others                                            one replica, over which weights are sharded
    ====================================================  ==========================================
    """
    if term in (traffic.TENSORS, traffic.HEADS):
        group = run.strategy.splitting
    elif term == traffic.REPLICAS:
        group = gpus
    else:
        group = gpus // run.strategy.replicas(run.ranks(gpus))
    return speeds.link if group <= gpus_per_node else speeds.network


def _forward_operations(role: Role, longest: int) -> int:
    """Count the operations of a token's forward pass, which passes some of the experts and no embedding matrix."""
    model = role.model
    # Each expert has three matrices (gate, up, down) from the hidden width to its own, `layer.expert`.
    unused = sum((layer.experts - layer.active) * 3 * layer.hidden * layer.expert for layer in model.layers)
    matrices = sum(p.elements for p in model.parameters if len(p.shape) > 1 and p.layer is not None) - unused
    head = model.vocabulary * model.hidden
    attention = sum(4 * layer.query * longest // 2 for layer in model.layers)  # half of the text is earlier, on average
    return 2 * (matrices + head) + attention


def generation_seconds(run: Run, gpus: int, cached_texts: int, speeds: Speeds) -> float:
    """Compute a lower bound of the seconds of generation: each token of the longest response reads all weights.

    Args:
        run: run with an engine.
        gpus: number of GPUs.
        cached_texts: number of texts that fit into the cache of an engine, at least 1.
        speeds: speeds of a GPU and its links.
    """
    assert run.engine is not None
    engine, work = run.engine, run.work
    engines = max(1, gpus // engine.tensor_parallel_size)
    rounds = -(-work.responses // (engines * max(1, cached_texts)))
    part = engine.element_bytes(run.actor) * run.actor.model.elements / engine.tensor_parallel_size
    return rounds * work.response_tokens * part / speeds.memory
