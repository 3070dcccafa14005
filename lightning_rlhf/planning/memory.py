"""Memory of one GPU, by term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_rlhf.planning import partition
from lightning_rlhf.planning.activations import backward_bytes, forward_bytes, kept_bytes, logits_bytes
from lightning_rlhf.planning.setup import Engine, Precision, Role, Strategy, Work, precision

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
GATHERED, ACTIVATIONS, LOGITS, STEP = "gathered or cast weights", "activations", "logits of a chunk", "optimizer's step"
ENGINE, CACHE, RUNTIME = "engine weights", "engine's KV cache", "CUDA context and NCCL"
PUSHED, SAVED = "weights pushed to the engine", "copy that a checkpoint is written from"
TERMS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, STEP, ENGINE, CACHE, RUNTIME)
_RUNTIME_BYTES = 2 * 2**30  # an allowance, not a measurement


def resting(role: Role, strategy: Strategy, numbers: Precision, ranks: int) -> Counter[str]:
    """Bytes of a role's parameters and optimizer state on one rank, wherever they lie.

    With P parameters of which T are trained, N ranks, w bytes of a weight and m of the optimizer's state (two moments
    and, with DeepSpeed, a float32 master):

        rlhf_single, rlhf_ddp    w P   + m T
        ZeRO-1, ZeRO-2           w P   + m T/N
        ZeRO-3, rlhf_fsdp        w P/N + m T/N

    See Rajbhandari et al. 2020, section 5; what "/N" is exactly, :mod:`lightning_rlhf.planning.partition` says. Tensor
    parallelism divides what it splits.

    Args:
        role: a model.
        strategy: how it lies.
        numbers: bytes of each number.
        ranks: that have different data.
    """
    weights, trained = elements(role, strategy, ranks)
    return Counter({PARAMETERS: numbers.weights * weights, OPTIMIZER: (2 * numbers.moment + numbers.master) * trained})


def gradients(role: Role, strategy: Strategy, numbers: Precision, ranks: int, micro_batches: int) -> tuple[int, int]:
    """Bytes of a trained role's gradients: those that always have memory, and those that its updates add.

        rlhf_single                      w T while it is updated
        rlhf_ddp                         w T always, in buckets
        rlhf_fsdp                        w T/N while it is updated; 4 T more where an update is made of several
                                         micro-batches and only the last one is summed over ranks
        ZeRO-1 with bfloat16 weights     4 T always, 2 T while it is updated; with float32 ones 4 T
        ZeRO-2                           4 T/N while it is updated
        ZeRO-3                           4 T/N always

    Args:
        role: a model.
        strategy: how it lies.
        numbers: bytes of each number.
        ranks: that have different data.
        micro_batches: of one update.
    """
    if not role.trained:
        return 0, 0
    shard = elements(role, strategy, ranks)[1]
    whole = role.adapters or partition.split_elements(role.model.parameters, strategy.tensor_parallel_size)
    if strategy.kind == "zero":
        if strategy.stage == 1:
            kept = 4 if numbers.weights == 2 and not strategy.offload_optimizer else 0
            return kept * whole, numbers.weights * whole
        return (numbers.shard * shard, 0) if strategy.stage == 3 else (0, numbers.shard * shard)
    if strategy.kind == "fsdp":
        unsummed = micro_batches > 1 and not strategy.reduce_every
        return 0, numbers.shard * shard + unsummed * numbers.reduce * whole
    return (numbers.weights * whole, 0) if strategy.kind == "ddp" else (0, numbers.weights * whole)


def gathered(role: Role, strategy: Strategy, numbers: Precision) -> tuple[int, int, int]:
    """Bytes of weights, and of gradients on their way, that exist only while a role computes.

    rlhf_fsdp gathers a decoder layer (u numbers) while the next one arrives; what is outside of the layers (r numbers,
    its largest parameter e) stays from the forward to the end of the backward pass. Gradients of a layer exist whole
    until they are summed, with c bytes in compute and s in the sum:

                  at the loss    in a layer                             at the end
        trained   c (r + e)      c (r + 2 u) + c (e + u) + s u          (2 c + s) r
        frozen    c r            c (r + 2 u)

    See "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", Zhao et al. 2023, section 3. ZeRO-3 keeps up
    to 10^9 numbers gathered and prefetches 5 x 10^7, ZeRO has a bucket of at most 5 x 10^8 gradients to sum
    (DeepSpeed's defaults, see :class:`~lightning_rlhf.planning.setup.Zero`). Autocast casts matrices in each pass and
    keeps the casts for the backward one; with checkpointing, those of one layer.

    Args:
        role: a model.
        strategy: how it lies.
        numbers: bytes of each number.

    Returns:
        At the loss, while the backward pass is in a layer, and at its end.
    """
    model, c = role.model, numbers.compute
    units = model.units
    largest = max(parameter.elements for parameter in units[None])
    if strategy.kind == "zero":
        zero = strategy.zero
        live = min(model.elements, zero.live + zero.prefetch) if strategy.stage == 3 else 0
        held = c * (live + zero.bucket_of(role.adapters or model.elements) * role.trained)
        return held, held, 0
    sizes = {u: partition.split_elements(own, strategy.tensor_parallel_size) for u, own in units.items()}
    rest, layer = sizes.pop(None), max(sizes.values())
    if strategy.kind == "fsdp":
        if not role.trained or role.lora_rank:
            return c * rest, c * (rest + 2 * layer), 0
        in_a_layer = c * (rest + 2 * layer) + c * (largest + layer) + numbers.reduce * layer
        return c * (rest + largest), in_a_layer, (2 * c + numbers.reduce) * rest
    if not numbers.autocast:
        return 0, 0, 0
    casts = [sum(p.elements for p in own if len(p.shape) == 2) for unit, own in units.items() if unit is not None]
    if not role.trained or strategy.checkpointing:
        return c * largest, c * max(casts), 0
    return c * (sum(casts) + largest), c * sum(casts), 0


def moments(roles: Sequence[Role], strategy: Strategy, work: Work, ranks: int) -> dict[str, Counter[str]]:
    """Bytes that come and go, at each moment that could be the fullest.

    Roles take turns. Each is fullest when its loss is worked out (all activations, the logits of a chunk), when the
    backward pass is in a layer (all activations, that layer's own), when FSDP sums the last gradients (those outside of
    the layers), or in its optimizer's step (a temporary copy: torch's AdamW takes the root of all second moments at
    once, DeepSpeed's copies its part of the gradients).

    Args:
        roles: of the run.
        strategy: how they lie.
        work: of a step.
        ranks: that have different data.
    """
    found = {}
    for role in roles:
        numbers = precision(strategy, role.dtype, work.mixed)
        texts = work.minibatch_size if role.trained else work.responses
        tokens = work.micro_batch_rows(texts, ranks) * work.row_tokens
        sizes = role.model, numbers, strategy.checkpointing, tokens, strategy.tensor_parallel_size, work.longest
        coming = _passing_gradients(role, strategy, numbers, ranks, work.micro_batches(texts, ranks))
        at_loss, in_layer, at_end = gathered(role, strategy, numbers)
        if role.trained:
            kept, beside = kept_bytes(*sizes), backward_bytes(*sizes)
        else:
            kept, beside = 0, forward_bytes(role.model, numbers, tokens, strategy.tensor_parallel_size, work.longest)
        logits = logits_bytes(role.model, tokens)
        for moment, passing in (
            ("the loss", {GATHERED: at_loss, ACTIVATIONS: kept, LOGITS: logits}),
            ("the layers", {GATHERED: in_layer, ACTIVATIONS: kept + beside}),
            ("the last sums", {GATHERED: at_end}),
        ):
            found[f"{moment} of the {role.name}"] = Counter({**passing, GRADIENTS: coming})
        if role.trained and not strategy.offload_optimizer:
            number = numbers.shard if strategy.kind == "zero" else numbers.moment
            temporary = number * elements(role, strategy, ranks)[1]
            left = _passing_gradients(role, strategy, numbers, ranks, 1)
            found[f"the optimizer's step of the {role.name}"] = Counter({STEP: temporary, GRADIENTS: left})
    return found


def engine_bytes(engine: Engine, actor: Role, work: Work, capacity: int) -> Counter[str]:
    """Bytes of the engine: its copy of the weights, and keys and values of the texts that it is writing.

        weights    w P / t
        cache      2 w layers key / t for each token; w layers (latent + turned) of latent attention

    with w the bytes of a number (those of the actor's source, if nothing else is said) and t the engine's
    tensor-parallel size. An engine with a share of the memory fills the rest of it with cache.

    Args:
        engine: on the GPUs of the trainer.
        actor: whose weights it has.
        work: how long texts are.
        capacity: bytes of a GPU.
    """
    weights = engine.number(actor) * actor.model.elements // engine.tensor_parallel_size
    cache = cache_bytes(engine, actor) * work.longest * engine.sequences
    if engine.share:
        cache = max(int(engine.share * capacity) - weights, cache)
    return Counter({ENGINE: weights, CACHE: cache})


def cache_bytes(engine: Engine, actor: Role) -> int:
    """Bytes of keys and values for each token, on one of the engine's GPUs."""
    return engine.number(actor) * sum(layer.cached(engine.tensor_parallel_size) for layer in actor.model.layers)


def saved_bytes(role: Role, strategy: Strategy, numbers: Precision, ranks: int) -> int:
    """Bytes of a trained role's copy in the host's memory, from which a checkpoint is written.

        rlhf_single, rlhf_ddp    w T + m T, on the first rank alone
        rlhf_fsdp                w T/N + m T/N
        ZeRO-1 to ZeRO-3         4 T/N + 8 T/N, whole parameters dealt to the ranks in turn

    Args:
        role: a model.
        strategy: how it lies.
        numbers: bytes of each number.
        ranks: that have different data.
    """
    trained = elements(role, strategy, ranks)[1]
    if strategy.kind == "zero":
        return 3 * 4 * trained
    return (numbers.weights + 2 * numbers.moment) * trained


def memory(
    roles: Sequence[Role],
    strategy: Strategy,
    work: Work,
    engine: Engine | None,
    gpus: int,
    capacity: int,
    background_save: bool = False,
) -> tuple[Counter[str], Counter[str], str]:
    """Bytes of one GPU at its fullest moment and of the host for each GPU, by term, and which moment that is.

    Args:
        roles: of the run, the actor among them.
        strategy: how they lie.
        work: of a step.
        engine: on the same GPUs, or None.
        gpus: in all.
        capacity: bytes of a GPU.
        background_save: whether checkpoints are written from a copy while training goes on.
    """
    ranks = gpus // strategy.tensor_parallel_size
    coming = moments(roles, strategy, work, ranks)
    when = max(coming, key=lambda moment: coming[moment].total())
    held, host = Counter({RUNTIME: _RUNTIME_BYTES}), Counter[str]()
    micro_batches = work.micro_batches(work.minibatch_size, ranks)
    for role in roles:
        numbers = precision(strategy, role.dtype, work.mixed)
        own = resting(role, strategy, numbers, ranks)
        own[GRADIENTS] = gradients(role, strategy, numbers, ranks, micro_batches)[0]
        if GRADIENTS in _offloaded(role, strategy):
            own[GRADIENTS] += gradients(role, strategy, numbers, ranks, 1)[1]
        for term in _offloaded(role, strategy):
            host[term] += own.pop(term)
        held += own
        if role.trained and (background_save or strategy.kind == "zero"):
            host[SAVED] += saved_bytes(role, strategy, numbers, ranks)
    held += coming[when]
    if engine is not None:
        actor = next(role for role in roles if role.name == "actor")
        held += engine_bytes(engine, actor, work, capacity)
        if engine.share:  # vLLM: a copy in shared memory for each engine, in the engine's dtype
            host[PUSHED] = engine.number(actor) * actor.model.elements // engine.tensor_parallel_size
    return held, +host, when


def elements(role: Role, strategy: Strategy, ranks: int) -> tuple[int, int]:
    """Numbers of a role that a rank stores, and those of them that its optimizer changes."""
    parameters, split = role.model.parameters, strategy.tensor_parallel_size
    if strategy.kind == "fsdp":
        weights = optimized = partition.fsdp_elements(parameters, ranks, split)
    elif strategy.stage == 3:
        weights = partition.zero3_elements(parameters, ranks, strategy.zero.persistent)
        optimized = partition.zero3_elements(parameters, ranks)
    else:
        weights = role.model.elements
        optimized = partition.flat_elements(weights, ranks) if strategy.kind == "zero" else weights
    if role.lora_rank:
        shared = strategy.kind in ("fsdp", "zero")
        optimized = partition.flat_elements(role.adapters, ranks) if shared else role.adapters
        weights += optimized if strategy.shards_weights else role.adapters
    return weights, optimized if role.trained else 0


def _passing_gradients(role: Role, strategy: Strategy, numbers: Precision, ranks: int, micro_batches: int) -> int:
    """Bytes on the GPU of gradients that an update adds; shards in the host's memory are not."""
    coming = gradients(role, strategy, numbers, ranks, micro_batches)[1]
    if GRADIENTS in _offloaded(role, strategy):
        coming -= gradients(role, strategy, numbers, ranks, 1)[1]
    return coming


def _offloaded(role: Role, strategy: Strategy) -> tuple[str, ...]:
    """Terms of a role that lie in the host's memory. ZeRO-1 keeps gradients on the GPU, offloaded or not."""
    optimizer = (OPTIMIZER,) if strategy.stage == 1 else (GRADIENTS, OPTIMIZER)
    frozen = strategy.offload_params if strategy.offload_frozen is None else strategy.offload_frozen
    params = strategy.offload_params if role.trained else frozen
    return (PARAMETERS,) * params + optimizer * (strategy.offload_optimizer and role.trained)
