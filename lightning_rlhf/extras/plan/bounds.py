"""Lower bounds of the seconds of a push, of generation and of a step, from the peak speeds of a GPU and its links."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from lightning_rlhf.extras.plan import traffic
from lightning_rlhf.extras.plan.architecture import Architecture
from lightning_rlhf.extras.plan.setup import Role, Run, Work


@dataclass(frozen=True)
class Speeds:
    """Peak speeds of one GPU and its links, by default those in the data sheet of an H100 SXM.

    Args:
        arithmetic: FLOP/s in bfloat16 without sparsity.
        memory: bytes/s of the GPU's memory.
        bus: bytes/s between GPU and host, one direction (printed as "host").
        link: bytes/s between GPUs of a node, one direction (printed as "NVLink").
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


def push_seconds(run: Run, sent: Counter[str], cluster: Cluster) -> float:
    """Compute a lower bound of the seconds of a push: gather, copy to the host, and from there to each GPU.

    The first rank of an engine copies each tensor to the host while the next one is gathered; each GPU of the engine
    copies its part back, after the trainer has written all.

    Args:
        run: run with an engine.
        sent: bytes that a GPU sends, by the terms of :mod:`.traffic`.
        cluster: GPUs of the run.
    """
    assert run.engine is not None
    to_host = run.engine.pushed_bytes(run.actor)
    to_each_gpu = to_host // run.engine.tensor_parallel_size
    gather = sent[traffic.PUSH] / _bytes_per_second(run, traffic.PUSH, cluster)
    return max(gather, to_host / cluster.speeds.bus) + to_each_gpu / cluster.speeds.bus


def generation_seconds(run: Run, cached_texts: int, cluster: Cluster) -> float:
    """Compute a lower bound of the seconds of generation: each decoding step of an engine reads the weights.

    There are at least as many decoding steps as tokens of the longest response, without speculative decoding. In each
    of its steps a text occupies the cache with its tokens so far, and a step has the whole cache to offer, so that a
    small cache needs more steps. Of a mixture of experts only the active ones count, as if all texts chose the same,
    and of the embedding nothing.

    Args:
        run: run with an engine.
        cached_texts: number of whole texts of the longest length that fit into the cache of an engine.
        cluster: GPUs of the run.
    """
    assert run.engine is not None
    engine, work = run.engine, run.work
    model = run.actor.model
    prompt, response = work.longest - work.response_tokens, work.response_tokens
    occupied = response * prompt / work.group_size + response**2 / 2  # tokens of a text, summed over its steps
    capacity = (cached_texts + 1) * work.longest  # tokens of a step: less than one more text fits
    engines = max(1, cluster.gpus // engine.tensor_parallel_size)
    decoding_steps = max(response, math.ceil(work.responses / engines) * occupied / capacity)
    read = engine.element_bytes(run.actor) * (_passed_weights(model) + model.vocabulary * model.hidden)
    return decoding_steps * read / engine.tensor_parallel_size / cluster.speeds.memory


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
        """No step is faster than the slower of the two, which can happen at the same time."""
        return max(self.arithmetic, self.communication)


def learning_seconds(run: Run, cluster: Cluster) -> LearningSeconds:
    """Compute the least seconds of a step whose texts all have the longest length, on the GPU with most of them.

    A prompt counts once for all texts that may share it. A forward pass has 2 FLOPs for each weight of a matrix that a
    token passes, and in attention 2 for each element of query and output and each earlier token. A backward pass has
    twice the FLOPs of the forward pass, and for matrices as many where only adapters are trained, because frozen ones
    have no gradients of their own; checkpointing adds a forward pass of the layers. Attention counts as full: a model
    with sliding windows has less of it in long texts.

    Args:
        run: run to plan.
        cluster: GPUs of the run.
    """
    ranks, work = run.ranks(cluster.gpus), run.work
    operations = 0.0
    for role in run.roles:
        counts = traffic.counts(role, work, ranks)
        evaluated, trained = counts.evaluated_rows, counts.trained_rows
        recomputed = trained if run.strategy.checkpointing else 0
        of_matrices = 2 if role.lora_rank else 3  # cost of a trained row, in forward passes
        of_rows: float = (evaluated + of_matrices * trained + recomputed) * _matrix_operations(role, work)
        of_rows += (evaluated + 3 * trained + recomputed) * _attention_operations(role, work)
        of_rows += (evaluated + of_matrices * trained) * _head_operations(role, work)
        operations += of_rows * (2 if work.pairs else 1)  # a row of pairs is two texts
    arithmetic = operations / run.strategy.splitting / cluster.speeds.arithmetic
    return LearningSeconds(arithmetic, _learning_communication(run, cluster))


def _learning_communication(run: Run, cluster: Cluster) -> float:
    """Compute the least seconds of what is sent while the module learns.

    Texts with shared prompts have fewer micro-batches, in each of which weights are gathered. The network and the links
    of a node work at the same time.
    """
    within_node = over_network = 0.0
    for term, size in traffic.traffic(replace(run, work=run.work.shared), cluster.gpus).items():
        if term in (traffic.PUSH, traffic.ENGINE):
            continue
        group = _group(run, term, cluster)
        if group.crosses_nodes:
            over_network += size / group.bytes_per_second(cluster)
        else:
            within_node += size / group.bytes_per_second(cluster)
    return max(within_node, over_network)


def _bytes_per_second(run: Run, term: str, cluster: Cluster) -> float:
    """Return how many bytes of a term a GPU can send in a second."""
    return _group(run, term, cluster).bytes_per_second(cluster)


@dataclass(frozen=True)
class _Group:
    """GPUs that exchange something.

    Args:
        of_a_node: how many of them are in a node; they pass what leaves it together, each by its own network card.
        crosses_nodes: whether there are others in other nodes.
    """

    of_a_node: int
    crosses_nodes: bool

    def bytes_per_second(self, cluster: Cluster) -> float:
        """Return the most bytes that each of them can send in a second."""
        speeds = cluster.speeds
        return min(speeds.link, speeds.network * self.of_a_node) if self.crosses_nodes else speeds.link


def _group(run: Run, term: str, cluster: Cluster) -> _Group:
    """Return the GPUs that exchange a term.

    ============  ==================================================================================================
    ``TENSORS``   neighbouring ones with the parts of a matrix, ``tensor_parallel_size``
    ``HEADS``     every such one of those with the same rows, ``tensor_parallel_size * sequence_parallel_size``
    ``REPLICAS``  one of each replica
    ``PUSH``      all of a replica, which have all weights together
    the others    every ``tensor_parallel_size``-th of a replica
    ============  ==================================================================================================
    """
    per_node, tensor_parallel = cluster.gpus_per_node, run.strategy.tensor_parallel_size
    replica = cluster.gpus // run.strategy.replicas(run.ranks(cluster.gpus))
    if term == traffic.REPLICAS:
        return _Group(max(1, per_node // replica), cluster.gpus > per_node)
    sizes = {traffic.TENSORS: tensor_parallel, traffic.HEADS: run.strategy.splitting}
    size = sizes.get(term, replica)
    every = 1 if term in (traffic.TENSORS, traffic.PUSH) else tensor_parallel
    return _Group(max(1, min(size, per_node) // every), size > per_node)


def _matrix_operations(role: Role, work: Work) -> int:
    """Count the operations of the layers' matrices for a text, with its share of the prompt."""
    return 2 * work.shared.longest * _passed_weights(role.model)


def _attention_operations(role: Role, work: Work) -> float:
    """Count the operations of attention for a text, with its share of those within the prompt."""
    prompt, response = work.longest - work.response_tokens, work.response_tokens
    within_prompt, within_response = prompt**2 / 2, response**2 / 2  # pairs of a token and an earlier one
    pairs = within_prompt / work.texts_of_a_prompt + response * prompt + within_response
    return 2 * pairs * sum(layer.query + (layer.output or layer.query) for layer in role.model.layers)


def _head_operations(role: Role, work: Work) -> int:
    """Count the operations of the head for a text: it computes the tokens whose log-probs are needed.

    Of a response these are all tokens. Of given texts and of conversations the number is unknown; none count, so that
    the sum stays a lower bound.
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
