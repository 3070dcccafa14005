"""Memory of one GPU and of its host, by term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_rlhf.extras.plan import partition
from lightning_rlhf.extras.plan.activations import Pass
from lightning_rlhf.extras.plan.setup import Engine, Precision, Role, Run, Strategy, Work, precision
from lightning_rlhf.rollout.gpu_memory import reserved_gpu_bytes

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
GATHERED = "gathered or cast weights"
ACTIVATIONS = "activations"
LOGITS = "logits of a chunk"
STEP = "optimizer's step"
ENGINE = "engine weights"
CACHE = "engine's KV cache"
ENGINE_PASS = "engine's activations"
RUNTIME = "CUDA context and NCCL"
TERMS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, STEP, ENGINE, ENGINE_PASS, CACHE, RUNTIME)
# Terms of host memory only.
PUSHED = "weights pushed to the engine"
SAVED = "copy that a checkpoint is written from"
ROUNDED = "rounding of page-locked memory"
_RUNTIME_BYTES = 2 * 2**30  # an allowance, not a measurement; an engine on the same GPU needs more
# vLLM 0.32's largest numbers of tokens and sequences of a pass, on GPUs with at least 70 GiB and on smaller ones. It
# reserves the memory of such a pass before it sizes the cache.
_ENGINE_PASSES = ((70 * 2**30, 16384, 1024), (0, 8192, 256))
_SAMPLED_COPIES = 3  # logits in float32, their log-probabilities, and those of the sampler


class Gradients(NamedTuple):
    """Bytes of gradients that always exist, and of those that exist while the role is updated."""

    always: int
    update: int


class Gathered(NamedTuple):
    """Bytes of gathered weights at the loss, while the backward pass is in a layer, and at the end of that pass."""

    at_loss: int
    in_layer: int
    at_end: int


@dataclass(frozen=True)
class Shard:
    """Part of one role on one rank.

    Formulas count P parameters, T of them trained, N ranks, w bytes of a weight and m of the optimizer's state (two
    moments and, with DeepSpeed, a float32 master). "/N" is exactly the rule in
    :mod:`lightning_rlhf.extras.plan.partition`; tensor parallelism divides the parameters that it splits.

    Args:
        role: the model.
        ranks: number N of ranks over which it is sharded.
        mixed: whether the Trainer's precision is ``bf16-mixed``.
        replicas: number of replicas of each shard.
    """

    role: Role
    strategy: Strategy
    ranks: int
    mixed: bool
    replicas: int = 1

    @classmethod
    def of(cls, role: Role, run: Run, ranks: int) -> Shard:
        """Return the shard of a role in a run with a number of data-parallel ranks."""
        replicas = run.strategy.replicas(ranks)
        shards = ranks // replicas * run.strategy.sequence_parallel_size
        return cls(role, run.strategy, shards, run.work.mixed, replicas)

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks of the run."""
        return self.ranks * self.replicas // self.strategy.sequence_parallel_size

    @cached_property
    def precision(self) -> Precision:
        """Bytes per element; adapters and their moments are float32 but under DeepSpeed."""
        if self.role.has_master_weights and self.strategy.kind != "zero":  # DeepSpeed has masters beside bfloat16
            return precision(self.strategy, "float32", mixed=True)
        result = precision(self.strategy, self.role.dtype, self.mixed)
        if self.role.lora_rank and self.strategy.kind != "zero":
            return replace(result, shard=4, moment=4)
        return result

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight and of its gradient."""
        if self.role.lora_rank and self.strategy.kind != "zero":
            return 4
        return self.precision.weights

    @property
    def state_bytes(self) -> float:
        """Bytes of the optimizer's state of a trained parameter, without a copy of the parameter."""
        if self.role.state_bytes is not None and self.strategy.kind != "zero":
            return self.role.state_bytes
        return 2 * self.precision.moment

    @cached_property
    def elements(self) -> tuple[int, int]:
        """Number of parameters that the rank stores, and of those whose optimizer state it stores."""
        role, strategy = self.role, self.strategy
        parameters = role.model.parameters
        if strategy.kind == "fsdp":
            stored, trained = (
                partition.fsdp_elements(part, self.ranks, strategy.tensor_parallel_size)
                for part in (parameters, role.model.trained)
            )
        elif strategy.stage == 3:
            stored = partition.zero3_elements(parameters, self.ranks, strategy.zero.persistent)
            trained = partition.zero3_elements(role.model.trained, self.ranks)
        else:
            stored = role.model.elements
            trained = sum(parameter.elements for parameter in role.model.trained)
            if strategy.kind == "zero":
                trained = partition.flat_elements(trained, self.ranks)
        if role.lora_rank:
            sharded = strategy.kind in ("fsdp", "zero")
            trained = partition.flat_elements(role.adapters, self.ranks) if sharded else role.adapters
            stored += self._stored_adapters
        return stored, trained if role.trained else 0

    @property
    def _stored_adapters(self) -> int:
        """Number of adapter parameters that the rank stores."""
        role = self.role
        if not role.lora_rank or not self.strategy.shards_weights:
            return role.adapters
        return partition.flat_elements(role.adapters, self.ranks)

    @property
    def trained_elements(self) -> int:
        """Number of parameters whose optimizer state the rank stores."""
        return self.elements[1]

    def resting(self) -> Counter[str]:
        """Compute the bytes of parameters and optimizer state, on the GPU or in host memory.

            rlhf_single, rlhf_ddp    w P   + m T
            ZeRO-1, ZeRO-2           w P   + m T/N
            ZeRO-3, rlhf_fsdp        w P/N + m T/N

        With LoRA, A adapters are stored in addition, in float32 but under DeepSpeed. A role that shares its base has
        only these, and quantization makes P smaller. See Rajbhandari et al. 2020, section 5.
        """
        stored, trained = self.elements
        adapters = self._stored_adapters
        base = self.precision.weights * (stored - adapters) - round(self.role.saved_by_quantization)
        if self.role.shares_base:
            base = 0
        state = round((self.state_bytes + self.precision.master) * trained)
        return Counter({PARAMETERS: base + self.trained_bytes * adapters, OPTIMIZER: state})

    def gradients(self, micro_batches: int) -> Gradients:
        """Compute the bytes of a trained role's gradients.

            rlhf_single                    w T while it is updated
            rlhf_ddp                       w T always, in buckets
            rlhf_fsdp                      w T/N while it is updated; 4 T more where an update has several
                                           micro-batches and only the last is reduced
            ZeRO-1 with bfloat16 weights   4 T always, 2 T while it is updated; with float32 weights 4 T
            ZeRO-2                         4 T/N while it is updated
            ZeRO-3                         4 T/N always

        Args:
            micro_batches: micro-batches of one update.
        """
        strategy = self.strategy
        if not self.role.trained:
            return Gradients(0, 0)
        whole = self.role.adapters or partition.split_elements(self.role.model.trained, strategy.tensor_parallel_size)
        whole_bytes = self.trained_bytes * whole
        shard_bytes = self.precision.shard * self.trained_elements
        if strategy.kind == "ddp":
            return Gradients(whole_bytes, 0)
        if strategy.kind == "single":
            return Gradients(0, whole_bytes)
        if strategy.kind == "fsdp":
            unreduced = micro_batches > 1 and not strategy.reduce_every
            return Gradients(0, shard_bytes + (self.precision.reduce * whole if unreduced else 0))
        if strategy.stage == 1:
            has_float32_copy = self.precision.weights == 2 and not strategy.offload_optimizer
            return Gradients(4 * whole if has_float32_copy else 0, whole_bytes)
        if strategy.stage == 3:
            return Gradients(shard_bytes, 0)
        return Gradients(0, shard_bytes)

    def update_gradients(self, micro_batches: int) -> int:
        """Compute the bytes on the GPU of gradients that an update adds; offloaded shards are not counted."""
        size = self.gradients(micro_batches).update
        if GRADIENTS in self.offloaded:
            return size - self.gradients(1).update
        return size

    def gathered(self) -> Gathered:
        """Compute the bytes of gathered or cast weights, and of gradients that are not yet reduced.

        rlhf_fsdp holds two decoder layers of u elements: the current one, and the next one that it prefetches. The r
        elements outside the layers, whose largest parameter has e, stay gathered from the forward pass to the end of
        the backward pass. Gradients of a layer are unsharded until they are reduced. With c bytes per element in
        compute and s in the reduction:

                      at the loss    in a layer                             at the end
            trained   c (r + e)      c (r + 2 u) + c (e + u) + s u          (2 c + s) r
            frozen    c r            c (r + 2 u)

        With reshard_after_forward: false, all P elements of a trained role stay gathered until the backward pass has
        left their layer:

            trained   c (P + e)      c P + the larger of 2 c u and c e + s u

        See "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", Zhao et al. 2023, section 3. ZeRO-3
        keeps up to 10^9 elements gathered and prefetches 5 x 10^7; ZeRO has a bucket of at most 5 x 10^8 gradients
        (DeepSpeed's defaults, see :class:`~lightning_rlhf.extras.plan.setup.Zero`). Autocast casts matrices in each
        pass and keeps them for the backward pass; with checkpointing, those of one layer.
        """
        role = self.role
        strategy = self.strategy
        model = role.model
        c = self.precision.compute
        if strategy.kind == "zero":
            live = 0
            if strategy.stage == 3:
                live = min(model.elements, strategy.zero.live + strategy.zero.prefetch)
            bucket = 0
            if role.trained:
                bucket = strategy.zero.bucket_of(role.adapters or model.elements)
            return Gathered(c * (live + bucket), c * (live + bucket), 0)
        largest = max(parameter.elements for parameter in model.units[None])
        if strategy.kind == "fsdp":
            sizes = {
                unit: partition.split_elements(parameters, strategy.tensor_parallel_size)
                for unit, parameters in model.units.items()
            }
            rest = sizes.pop(None)
            layer = max(sizes.values())
            stays_gathered = role.trained and strategy.reshards is False
            at_loss = rest + stays_gathered * sum(sizes.values())
            if not role.trained or role.lora_rank:
                return Gathered(c * at_loss, c * (at_loss + 2 * layer), 0)
            gradients = c * largest + self.precision.reduce * layer
            in_layer = max(2 * c * layer, gradients) if stays_gathered else 3 * c * layer + gradients
            at_end = (2 * c + self.precision.reduce) * rest
            return Gathered(c * (at_loss + largest), c * at_loss + in_layer, at_end)
        if role.quantization is not None:  # a layer is dequantized in each pass
            linear = max(parameter.elements for parameter in model.parameters if parameter.linear)
            return Gathered(0, c * linear, 0)
        if not self.precision.autocast:
            return Gathered(0, 0, 0)
        casts = [
            sum(parameter.elements for parameter in parameters if len(parameter.shape) == 2)
            for unit, parameters in model.units.items()
            if unit is not None
        ]
        if not role.trained or strategy.checkpointing:
            return Gathered(c * largest, c * max(casts), 0)
        return Gathered(c * (sum(casts) + largest), c * sum(casts), 0)

    def saved_bytes(self) -> int:
        """Compute the bytes of the copy in host memory from which a checkpoint is written.

        rlhf_single, rlhf_ddp    w T + m T, on the first rank alone
        rlhf_fsdp                w T/N + m T/N
        ZeRO-1 to ZeRO-3         4 T/N + 8 T/N, whole parameters assigned to the ranks in turn
        """
        if self.strategy.kind == "zero":
            return 3 * 4 * self.trained_elements
        return round((self.trained_bytes + self.state_bytes) * self.trained_elements)

    @property
    def offloaded(self) -> list[str]:
        """Terms of the role in host memory; ZeRO-1 keeps gradients on the GPU."""
        strategy = self.strategy
        offload_params = strategy.offload_params
        if not self.role.trained and strategy.offload_frozen is not None:
            offload_params = strategy.offload_frozen
        terms = [PARAMETERS] if offload_params else []
        if self.role.trained and strategy.offload_optimizer:
            terms += [OPTIMIZER] if strategy.stage == 1 else [GRADIENTS, OPTIMIZER]
        return terms


def moments(run: Run, ranks: int) -> dict[str, Counter[str]]:
    """Compute the temporary bytes of each moment at which memory may peak.

    Only one role computes at a time. Its memory may peak when its loss is computed (all activations, logits of a
    chunk), while the backward pass is in a layer (all activations, working memory of that layer), when FSDP reduces the
    last gradients (those outside the layers), or in its optimizer's step, for which DeepSpeed copies its part of the
    gradients; torch's fused AdamW needs no copy.

    Args:
        run: run to plan.
        ranks: number of data-parallel ranks.
    """
    work, strategy = run.work, run.strategy
    peaks = {}
    for role in run.roles:
        shard = Shard.of(role, run, ranks)
        texts = work.minibatch_size if role.trained else work.responses
        one_pass = pass_of(shard, work, ranks)
        if role.trained:
            kept = one_pass.layer_kept_bytes() if strategy.activation_offload else one_pass.kept_bytes()
            activations, working = min(kept, one_pass.kept_bytes()), one_pass.backward_bytes()
        else:
            activations, working = 0, one_pass.forward_bytes()
        gathered = shard.gathered()
        gradients = {GRADIENTS: shard.update_gradients(work.micro_batches(texts, ranks))}
        logits = one_pass.logits_bytes()
        if role.trained and work.divergence_bytes:
            logits = work.divergence_bytes + teacher_heads(run)
        loss = {GATHERED: gathered.at_loss, ACTIVATIONS: activations, LOGITS: logits}
        peaks[f"the loss of the {role.name}"] = Counter(loss | gradients)
        layers = {GATHERED: gathered.in_layer, ACTIVATIONS: activations + working}
        peaks[f"the layers of the {role.name}"] = Counter(layers | gradients)
        peaks[f"the last sums of the {role.name}"] = Counter({GATHERED: gathered.at_end} | gradients)
        if role.trained and not strategy.offload_optimizer:
            element = shard.precision.shard if strategy.kind == "zero" else 0
            step = {STEP: element * shard.trained_elements, GRADIENTS: shard.update_gradients(1)}
            peaks[f"the optimizer's step of the {role.name}"] = Counter(step)
    return peaks


def pass_of(shard: Shard, work: Work, ranks: int) -> Pass:
    """Return the pass of a micro-batch through a role."""
    role, strategy = shard.role, shard.strategy
    texts = work.minibatch_size if role.trained else work.responses
    return Pass(
        model=role.model,
        precision=shard.precision,
        tokens=-(-work.micro_batch_rows(texts, ranks) * work.row_tokens // strategy.sequence_parallel_size),
        split=strategy.tensor_parallel_size,
        length=work.longest,
        checkpointing=strategy.checkpointing,
        trains_head=role.trained and not role.lora_rank,
    )


def offloaded_activations(run: Run, ranks: int) -> Counter[str]:
    """Compute the host memory of the activations of one trained role; only one role computes at a time."""
    if not run.strategy.activation_offload:
        return Counter()
    passes = [pass_of(Shard.of(role, run, ranks), run.work, ranks) for role in run.roles if role.trained]
    largest = max(passes, key=Pass.kept_bytes)
    state = largest.tokens * largest.model.hidden * largest.precision.compute
    size = largest.kept_bytes()
    return Counter({ACTIVATIONS: size, ROUNDED: size * page_rounding([state]) // state})


def page_rounding(sizes: Iterable[int]) -> int:
    """Return the bytes that torch adds to tensors in page-locked memory: it rounds each to a power of two.

    Args:
        sizes: bytes of the tensors.
    """
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if size)


def _offloaded_rounding(shard: Shard, term: str, size: int) -> int:
    """Return the bytes of :func:`page_rounding` of a term of a role in host memory."""
    model, parts = shard.role.model, 2 if term == OPTIMIZER else 1
    parameters = model.parameters if term == PARAMETERS else model.trained
    if shard.strategy.kind == "zero" or (shard.role.lora_rank and term != PARAMETERS):  # one tensor for all
        return page_rounding([size])
    elements = sum(parameter.elements for parameter in parameters)
    return parts * page_rounding(size * parameter.elements // elements // parts for parameter in parameters)


def teacher_heads(run: Run) -> int:
    """Return the bytes of the heads of sharded teachers, which are gathered for the updates of a step."""
    if not run.work.teachers_in_updates or not run.strategy.shards_weights:
        return 0
    teachers = (role for role in run.roles if role.is_teacher)
    return sum(role.model.vocabulary * role.model.hidden * (2 if role.dtype == "bfloat16" else 4) for role in teachers)


def engine_bytes(engine: Engine, actor: Role, work: Work, capacity: int) -> Counter[str]:
    """Compute the bytes of the engine's weights, of a pass, and of its KV cache.

        weights        w P / t
        activations    the larger of w (4 h + 3 f/t) for each token, and 12 for each sequence and vocabulary entry
        cache          2 w layers key / t for each token; w layers (latent + rotary) of latent attention

    with w the bytes per element, t the engine's tensor-parallel size, h the width and f that of the MLP or of the
    active experts. An engine with a fraction of the memory uses the rest of this fraction as cache.

    Args:
        engine: engine on the GPUs of the trainer.
        actor: model of the engine.
        work: data of a step.
        capacity: bytes of a GPU.
    """
    weights = engine.element_bytes(actor) * actor.model.elements // engine.tensor_parallel_size
    cache = cache_bytes(engine, actor) * work.longest * engine.sequences
    activations = 0
    if engine.share:
        activations = pass_bytes(engine, actor, work, capacity)
        cache = max(int(engine.share * capacity) - weights - activations, cache)
    return Counter({ENGINE: weights, ENGINE_PASS: activations, CACHE: cache})


def pass_bytes(engine: Engine, actor: Role, work: Work, capacity: int) -> int:
    """Compute the bytes of the largest pass that vLLM profiles; see :func:`engine_bytes`."""
    _, tokens, sequences = next(limits for limits in _ENGINE_PASSES if capacity >= limits[0])
    tokens = min(tokens, sequences * work.longest)
    inner = max(layer.dense + layer.active * layer.expert for layer in actor.model.layers)
    widths = 4 * actor.model.hidden + 3 * inner // engine.tensor_parallel_size
    sampling = _SAMPLED_COPIES * 4 * sequences * actor.model.vocabulary
    return max(engine.element_bytes(actor) * tokens * widths, sampling)


def cache_bytes(engine: Engine, actor: Role) -> int:
    """Compute the bytes per token of the KV cache on one of the engine's GPUs."""
    elements = sum(layer.cache_elements(engine.tensor_parallel_size) for layer in actor.model.layers)
    return engine.element_bytes(actor) * elements


def memory(run: Run, gpus: int) -> tuple[Counter[str], Counter[str], str]:
    """Compute the bytes of a GPU at its peak.

    Args:
        run: run to plan.
        gpus: number of GPUs.

    Returns:
        Bytes of the GPU by term, bytes of host memory per GPU by term, and the moment of the peak.
    """
    ranks = run.ranks(gpus)
    temporary = moments(run, ranks)
    shared = run.engine is not None and run.engine.share > 0
    gpu = Counter({RUNTIME: max(_RUNTIME_BYTES, reserved_gpu_bytes(run.capacity)) if shared else _RUNTIME_BYTES})
    host = Counter[str]()
    micro_batches = run.work.micro_batches(run.work.minibatch_size, ranks)
    for role in run.roles:
        shard = Shard.of(role, run, ranks)
        resting = shard.resting()
        resting[GRADIENTS] = shard.gradients(micro_batches).always
        if GRADIENTS in shard.offloaded:
            resting[GRADIENTS] += shard.gradients(1).update
        for term in shard.offloaded:
            host[ROUNDED] += _offloaded_rounding(shard, term, resting[term])
            host[term] += resting.pop(term)
        if run.strategy.offload_idle:
            term, users = PARAMETERS, [role.name]
            if role.trained:
                term, users = OPTIMIZER, run.trained
            host[term] += resting[term]
            host[ROUNDED] += _offloaded_rounding(shard, term, resting[term])
            for moment in temporary:
                if moment.endswith(tuple(f"of the {name}" for name in users)):
                    temporary[moment][term] += resting[term]
            del resting[term]
        gpu += resting
        if role.trained and (run.background_save or run.strategy.kind == "zero"):
            host[SAVED] += shard.saved_bytes()
    host += offloaded_activations(run, ranks)
    peak = max(temporary, key=lambda moment: temporary[moment].total())
    training = gpu + temporary[peak]
    if run.engine is None:
        return training, +host, peak
    engine = engine_bytes(run.engine, run.actor, run.work, run.capacity)
    if not run.engine.sleeps:
        gpu = training + engine
    else:
        # In validations, the frozen models compute while the engine is awake.
        frozen = tuple(f"of the {role.name}" for role in run.roles if not role.trained)
        passes = [bytes_ for moment, bytes_ in temporary.items() if moment.endswith(frozen)]
        generation = gpu + engine + max(passes, key=Counter.total, default=Counter())
        gpu, peak = max((training, peak), (generation, "generation"), key=lambda each: each[0].total())
    if run.engine.share:  # vLLM: a copy in shared memory for each engine, in the engine's dtype
        pushed = run.engine.element_bytes(run.actor) * run.actor.model.elements
        host[PUSHED] = pushed // run.engine.tensor_parallel_size
    return gpu, +host, peak
