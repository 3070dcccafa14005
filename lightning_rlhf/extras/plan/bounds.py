"""Host memory of a node, and lower bounds of the seconds of a push, of generation and of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from lightning_rlhf.extras.plan import memory, traffic
from lightning_rlhf.extras.plan.architecture import Architecture
from lightning_rlhf.extras.plan.setup import Role, Run, Strategy, Work

_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class Speeds:
    """Peak speeds of one GPU and its links, by default those in the data sheet of an H100 SXM.

    Args:
        arithmetic: FLOP/s in bfloat16 without sparsity.
        memory: bytes/s of the GPU's memory.
        bus: bytes/s between GPU and host, one direction ("host" in the text).
        link: bytes/s between GPUs of a node, one direction ("NVLink").
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
class Cluster:
    """GPUs of a run.

    Args:
        gpus: number of GPUs.
        gpus_per_node: number of GPUs of a node, which are joined by ``speeds.link``.
        speeds: speeds of a GPU and its links.
    """

    gpus: int
    gpus_per_node: int
    speeds: Speeds = Speeds()


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
    largest = max(role.model.elements * _bytes_per_weight(role, run.strategy) for role in run.roles)
    trained = next(role for role in run.roles if role.trained)
    return NodeMemory(
        training=training,
        loading=largest * (gpus_per_node if every_rank_is_whole else 1),
        exporting=trained.model.elements * _bytes_per_weight(trained, run.strategy),
    )


def _bytes_per_weight(role: Role, strategy: Strategy) -> int:
    """Return the bytes of a weight of a role as it is loaded and exported.

    A trained role in bfloat16 is loaded in float32, its master weights, except under ZeRO, which makes them itself.
    """
    has_masters = role.has_master_weights and strategy.kind != "zero"
    return _FLOAT32_BYTES if role.dtype != "bfloat16" or has_masters else _BFLOAT16_BYTES


def push_seconds(run: Run, sent: Counter[str], cluster: Cluster) -> float:
    """Compute a lower bound of the seconds of a push: gather, copy to the host, and from there to each GPU.

    The first rank of an engine copies all weights to the host; each GPU of the engine copies its part back. The engine
    loads after the trainer has written.

    Args:
        run: run with an engine.
        sent: bytes that a GPU sends, by term.
        cluster: its GPUs.
    """
    assert run.engine is not None
    to_host = run.engine.pushed_bytes(run.actor)
    to_each_gpu = to_host // run.engine.tensor_parallel_size
    gather = sent[traffic.PUSH] / _bytes_per_second(run, traffic.PUSH, cluster)
    return gather + (to_host + to_each_gpu) / cluster.speeds.bus


@dataclass(frozen=True)
class LearningSeconds:
    """Lower bounds of the seconds of a step without generation and push.

    Args:
        arithmetic: seconds of the operations.
        communication: seconds of what is sent.
    """

    arithmetic: float
    communication: float

    @property
    def least(self) -> float:
        """The larger bound, because both can happen at the same time."""
        return max(self.arithmetic, self.communication)


def learning_seconds(run: Run, cluster: Cluster) -> LearningSeconds:
    """Compute the least seconds of a step whose texts all have the longest length, on the GPU with most of them.

    A prompt counts once for all texts that may share it. A forward pass has 2 FLOPs for each weight of a matrix that a
    token passes, and in attention 2 for each element of query and output and each earlier token. A backward pass has
    twice the FLOPs of the forward pass, and as many where only adapters are trained, because frozen matrices have no
    gradients of their own; checkpointing adds a forward pass of the layers.

    Args:
        run: run to plan.
        cluster: its GPUs.
    """
    ranks, work = run.ranks(cluster.gpus), run.work
    operations = 0.0
    for role in run.roles:
        counts = traffic.counts(role, work.shared, ranks)
        forward_and_backward = 2 if role.lora_rank else 3
        head_passes = counts.evaluated_rows + forward_and_backward * counts.trained_rows
        layer_passes = head_passes + run.strategy.checkpointing * counts.trained_rows
        of_text = layer_passes * _layer_operations(role, work) + head_passes * _head_operations(role, work)
        operations += (1 + work.pairs) * of_text
    communication = sum(
        size / _bytes_per_second(run, term, cluster)
        for term, size in traffic.traffic(replace(run, work=work.shared), cluster.gpus).items()
        if term not in (traffic.PUSH, traffic.ENGINE)  # not while the module learns
    )
    return LearningSeconds(operations / run.strategy.splitting / cluster.speeds.arithmetic, communication)


def _bytes_per_second(run: Run, term: str, cluster: Cluster) -> float:
    """Return the bytes per second of the slowest link of a term, which is the network unless its group is in one node.

    ============  ====================================================================================
    term          GPUs that exchange it
    ============  ====================================================================================
    ``TENSORS``   neighbouring ones with the parts of a matrix, ``tensor_parallel_size``
    ``HEADS``     neighbouring ones with the same rows: ``tensor_parallel_size * sequence_parallel_size``
    ``REPLICAS``  all
    the others    one replica, over which weights are sharded
    ============  ====================================================================================
    """
    if term == traffic.TENSORS:
        group = run.strategy.tensor_parallel_size
    elif term == traffic.HEADS:
        group = run.strategy.splitting
    elif term == traffic.REPLICAS:
        group = cluster.gpus
    else:
        group = cluster.gpus // run.strategy.replicas(run.ranks(cluster.gpus))
    return cluster.speeds.link if group <= cluster.gpus_per_node else cluster.speeds.network


def _layer_operations(role: Role, work: Work) -> float:
    """Count the operations of the layers for a text, whose prompt counts for its part of the texts that share it."""
    prompt, response = work.longest - work.response_tokens, work.response_tokens
    pairs = prompt**2 / 2 / work.sharing_texts + response * prompt + response**2 / 2  # of a token and an earlier one
    widths = sum(layer.query + (layer.output or layer.query) for layer in role.model.layers)
    return 2 * (work.shared.longest * _passed_weights(role.model) + pairs * widths)


def _head_operations(role: Role, work: Work) -> int:
    """Count the operations of the head for a text: it computes the tokens whose log-probs are needed.

    These are at most the response. How many they are of given texts and of conversations is not known: none count.
    """
    tokens = 0 if work.turns else work.response_tokens
    return 2 * tokens * role.model.vocabulary * role.model.hidden


def _passed_weights(model: Architecture) -> int:
    """Count the weights of the layers' matrices that a token passes: of a mixture of experts, the active ones."""
    return sum(p.elements for p in model.parameters if len(p.shape) > 1 and p.layer is not None) - _idle_experts(model)


def _idle_experts(model: Architecture) -> int:
    """Count the weights of the experts that a token does not pass; 0 without a mixture of experts."""
    # Each expert has three matrices (gate, up, down) from the hidden width to its own, `layer.expert`.
    return sum((layer.experts - layer.active) * 3 * layer.hidden * layer.expert for layer in model.layers)


def generation_seconds(run: Run, cached_texts: int, cluster: Cluster) -> float:
    """Compute a lower bound of the seconds of generation: each token of the longest response reads the weights.

    Of a mixture of experts only the active ones count, as if all texts chose the same, and of the embedding nothing.

    Args:
        run: run with an engine.
        cached_texts: number of texts that fit into the cache of an engine; 0 counts as 1.
        cluster: its GPUs.
    """
    assert run.engine is not None
    engine, work = run.engine, run.work
    model = run.actor.model
    engines = max(1, cluster.gpus // engine.tensor_parallel_size)
    rounds = -(-work.responses // (engines * max(1, cached_texts)))
    read = engine.element_bytes(run.actor) * (_passed_weights(model) + model.vocabulary * model.hidden)
    return rounds * work.response_tokens * read / engine.tensor_parallel_size / cluster.speeds.memory
