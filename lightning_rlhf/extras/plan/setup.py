"""Inputs of a plan: strategy, roles, engine and work of a run, and the bytes per element of each kind of tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.plan.architecture import Architecture

Kind = Literal["single", "ddp", "fsdp", "zero"]
_KINDS: dict[str, Kind] = {"rlhf_single": "single", "rlhf_ddp": "ddp", "rlhf_fsdp": "fsdp"}
NODE_GPUS = 8  # of a node whose number is not set
_DEEPSPEED = re.compile(r"rlhf_deepspeed_stage_([123])")


@dataclass(frozen=True)
class Zero:
    """Sizes of DeepSpeed's buffers in elements, with its defaults.

    Args:
        bucket: number of gradients that are reduced together; None: 5 x 10^8, or all gradients of a smaller role.
        live: number of parameters that stage 3 keeps gathered.
        prefetch: number of parameters that stage 3 prefetches.
        persistent: size below which stage 3 keeps a parameter gathered.
    """

    bucket: int | None = None
    live: int = 1_000_000_000
    prefetch: int = 50_000_000
    persistent: int = 100_000

    def bucket_of(self, gradients: int) -> int:
        """Return the bucket of a role with this many gradients."""
        if self.bucket is None:
            return min(gradients, 500_000_000)
        return self.bucket


@dataclass(frozen=True)
class Strategy:
    """Distribution of the roles over GPUs.

    Args:
        name: name in the configuration.
        kind: one process, DDP, FSDP2 or DeepSpeed's ZeRO.
        stage: stage of ZeRO, 1 to 3; 0 for other kinds.
        tensor_parallel_size: GPUs that split the matrices of a layer, at least 1.
        sequence_parallel_size: GPUs that divide the tokens of a row, at least 1.
        shard_size: data-parallel ranks over which FSDP shards weights; None is those of a node.
        node_gpus: GPUs of each node, of which there may be several; None is one node of any size.
        checkpointing: whether the backward pass recomputes the activations of a layer.
        activation_offload: whether kept activations are in host memory until the backward pass.
        reshards: whether FSDP frees a trained role's gathered weights between forward and backward; None frees those of
            layers only.
        reduce_every: whether FSDP reduces gradients in every micro-batch, not only in the last one of an update.
        offload_optimizer: whether gradients and optimizer state are in host memory.
        offload_params: whether parameters are in host memory.
        offload_frozen: whether parameters of frozen roles are in host memory; None is ``offload_params``.
        offload_idle: whether parameters of frozen roles and optimizer state are in host memory while they are not used.
        zero: sizes of DeepSpeed's buffers.
    """

    name: str
    kind: Kind
    stage: int = 0
    tensor_parallel_size: int = 1
    sequence_parallel_size: int = 1
    shard_size: int | None = None
    node_gpus: int | None = None
    checkpointing: bool = False
    activation_offload: bool = False
    reshards: bool | None = None
    reduce_every: bool = True
    offload_optimizer: bool = False
    offload_params: bool = False
    offload_frozen: bool | None = None
    offload_idle: bool = False
    zero: Zero = Zero()

    @property
    def shards_weights(self) -> bool:
        """Whether each GPU holds only a part of each model."""
        return self.kind == "fsdp" or self.stage == 3

    @property
    def splitting(self) -> int:
        """Number of GPUs with the same rows."""
        return self.tensor_parallel_size * self.sequence_parallel_size

    @property
    def splitting_options(self) -> str:
        """Names of the options whose product is :attr:`splitting`, for messages."""
        if self.sequence_parallel_size == 1:
            return "tensor_parallel_size"
        return "tensor_parallel_size times sequence_parallel_size,"

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas of each shard.

        Args:
            ranks: number of data-parallel ranks.

        Raises:
            ValueError: ``shard_size``, or the ranks of a node, do not divide it.
        """
        shards = self.shard_size
        if shards is None:
            if self.kind != "fsdp" or self.node_gpus is None or ranks * self.splitting <= self.node_gpus:
                return 1
            shards = max(self.node_gpus // self.splitting, 1)
        if ranks % shards:
            raise UsageError(f"shard_size {shards} does not divide {ranks} data-parallel ranks: set it to a divisor")
        return ranks // shards


def strategy(name: str, **options: Any) -> Strategy:
    """Create the strategy with a name.

    Args:
        name: ``rlhf_single``, ``rlhf_ddp``, ``rlhf_fsdp`` or ``rlhf_deepspeed_stage_{1,2,3}``; the last two also with
            ``_offload``.
        **options: further fields of :class:`Strategy`.

    Raises:
        ValueError: the name is unknown, or the strategy has no tensor or sequence parallelism.
    """
    plain = name.removesuffix("_offload")
    offload = plain != name
    deepspeed = _DEEPSPEED.fullmatch(plain)
    if (plain not in _KINDS and deepspeed is None) or (offload and plain in ("rlhf_single", "rlhf_ddp")):
        raise UsageError(
            f"plan supports rlhf_single, rlhf_ddp, rlhf_fsdp and rlhf_deepspeed_stage_1, _2, _3, the last four also "
            f"with _offload; got strategy {name!r}"
        )
    if options.get("tensor_parallel_size", 1) > 1 and plain != "rlhf_fsdp":
        raise UsageError(f"{name} has no tensor parallelism: use rlhf_fsdp, or tensor_parallel_size 1")
    if options.get("sequence_parallel_size", 1) > 1 and plain != "rlhf_fsdp":
        raise UsageError(f"{name} has no sequence parallelism: use rlhf_fsdp, or sequence_parallel_size 1")
    stage = int(deepspeed[1]) if deepspeed else 0
    if offload:
        options = {"offload_optimizer": True, "offload_params": plain == "rlhf_fsdp" or stage == 3} | options
    return Strategy(name, "zero" if deepspeed else _KINDS[plain], stage, **options)


@dataclass(frozen=True)
class Precision:
    """Bytes per element of each kind of tensor.

    Args:
        weights: stored parameters; also gradients of a single process or of DDP.
        compute: gathered or cast weights, and activations.
        reduce: gradients while ranks sum them.
        shard: gradients of a sharding strategy after the sum.
        master: DeepSpeed's float32 copy of the parameters; 0 without one.
        moment: each of Adam's two moments.
        autocast: whether each matrix is cast when it is used.
    """

    weights: int
    compute: int
    reduce: int
    shard: int
    master: int
    moment: int
    autocast: bool = False


def precision(strategy: Strategy, dtype: str, mixed: bool) -> Precision:
    """Return the bytes per element of a role's tensors.

    torch's AdamW keeps moments in the dtype of the parameters. Under FSDP2's mixed precision parameters are float32, a
    layer is gathered in bfloat16, and gradients are summed in float32. DeepSpeed computes with bfloat16 weights, and
    keeps its part of the gradients, the master weights and the moments in float32 ("ZeRO: Memory Optimizations Toward
    Training Trillion Parameter Models", Rajbhandari et al. 2020, section 3.1), the masters even for float32 weights.

    Args:
        dtype: dtype of the model's source, float32 or bfloat16.
        mixed: whether the Trainer's precision is ``bf16-mixed``.
    """
    half = dtype == "bfloat16"
    compute = 2 if half or mixed else 4
    if strategy.kind == "zero":
        return Precision(weights=compute, compute=compute, reduce=compute, shard=4, master=4, moment=4)
    weights = 2 if half else 4
    reduce = 4 if strategy.kind == "fsdp" else weights
    autocast = mixed and not half and strategy.kind != "fsdp"
    return Precision(weights, compute, reduce, shard=weights, master=0, moment=weights, autocast=autocast)


@dataclass(frozen=True)
class Role:
    """One model of a run.

    Args:
        name: actor, critic, ref, reward_model, or teacher and a source.
        model: shapes of its parameters.
        trained: whether it has gradients and an optimizer.
        dtype: dtype of its source, float32 or bfloat16.
        lora_rank: rank of the adapters, then the only trained parameters; 0 trains all parameters.
        lora_targets: names of the linear layers with adapters; None: all linear layers.
        is_reference_too: whether the reference is this model with disabled adapters.
        quantization: kind of numbers of its frozen linear layers, nf4 or int8; None keeps ``dtype``.
        shares_base: whether its frozen weights are those of an earlier role.
        state_bytes: bytes of the optimizer's state of a parameter; None: the two moments of Adam.
    """

    name: str
    model: Architecture
    trained: bool
    dtype: str = "float32"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] | None = None
    is_reference_too: bool = False
    quantization: str | None = None
    shares_base: bool = False
    state_bytes: float | None = None

    @property
    def has_master_weights(self) -> bool:
        """Whether all weights are trained and the source is in bfloat16: they are then stored in float32."""
        return self.trained and self.dtype == "bfloat16" and not self.lora_rank

    @property
    def is_teacher(self) -> bool:
        """Whether the model is a teacher of a DistillationModule."""
        return self.name == "teacher" or self.name.startswith("teacher_")

    @property
    def saved_by_quantization(self) -> float:
        """Bytes by which quantization reduces the weights of the linear layers of ``dtype``.

        A weight has 1/2 byte and 1/64 of a scale of a byte, which has 1/256 of a float32 scale, in nf4; a byte in int8,
        whose scales have 4 bytes for each output.
        """
        if self.quantization is None:
            return 0.0
        width = 2 if self.dtype == "bfloat16" else 4
        saved = 0.0
        for matrix in self.model.parameters:
            if matrix.linear:
                if self.quantization == "nf4":
                    stored = matrix.elements * (1 / 2 + (1 + 4 / 256) / 64)
                else:
                    stored = matrix.elements + 4 * matrix.shape[0]
                saved += width * matrix.elements - stored
        return saved

    @property
    def adapters(self) -> int:
        """Parameters that LoRA trains; 0 without LoRA.

        rank x (inputs + outputs) of each adapted matrix (Hu et al. 2021), and the head of a scalar model.
        """
        if not self.lora_rank:
            return 0
        linear = [parameter for parameter in self.model.parameters if parameter.linear]
        shapes = [matrix.shape for matrix in linear if self.lora_targets is None or matrix.linear in self.lora_targets]
        head = 0 if self.model.vocabulary else self.model.hidden
        return sum(self.lora_rank * (outputs + inputs) for outputs, inputs in shapes) + head


@dataclass(frozen=True)
class Engine:
    """Engine on the GPUs of the trainer.

    Args:
        share: reserved share of a GPU's memory (vLLM's ``gpu_memory_utilization``); 0 reserves nothing.
        tensor_parallel_size: GPUs of one engine, at least 1.
        sequences: responses generated at once by an engine that reserves nothing.
        dtype: dtype of weights and cache; None uses the dtype of the actor's source.
        sleeps: whether its memory is free while the module learns (``sleep_while_learning``).
        gets_adapters: whether a push after the first one contains the actor's adapters only (``VLLMAdapterEngine``).
    """

    share: float
    tensor_parallel_size: int = 1
    sequences: int = 1
    dtype: str | None = None
    sleeps: bool = False
    gets_adapters: bool = False

    def pushed_bytes(self, actor: Role) -> int:
        """Return the bytes of a push after the first one; adapters are float32."""
        if self.gets_adapters:
            return 4 * actor.adapters
        return self.element_bytes(actor) * actor.model.elements

    def element_bytes(self, actor: Role) -> int:
        """Return the bytes per element of weights and cache."""
        if (self.dtype or actor.dtype) == "bfloat16":
            return 2
        return 4


@dataclass(frozen=True)
class Work:
    """Data of one step, over all ranks.

    Args:
        responses: texts, or pairs of texts, that a step trains on.
        minibatch_size: texts or pairs of one optimizer step.
        update_epochs: number of times that each text is trained on.
        longest: tokens of the longest text, prompt included.
        micro_batch_tokens: largest number of tokens in one forward pass.
        evaluates_old: whether the actor computes log-probs before the first update.
        mixed: whether the Trainer's precision is ``bf16-mixed``.
        pairs: whether a row is two texts, padded to the longer one and passed through a model together.
        evaluates_mismatched: whether actor and reference have a pass over mismatched responses, as in KTO.
        reuses_first: whether the log-probs of the first mini-batch are from the forward pass of its update.
        turns: largest number of turns of a conversation with an environment; 0 without an environment.
        environment_processes: largest number of processes of environments that one engine serves.
        response_tokens: tokens of the longest response; 0 without an engine.
        group_size: responses to a prompt.
        shares_prompts: whether a pass may compute a prompt once for all of its responses.
        divergence_bytes: memory of the logits of student and teachers at a time; 0 without distillation.
        teachers_in_updates: whether teachers are evaluated in each update, as for whole distributions.
    """

    responses: int
    minibatch_size: int
    update_epochs: int
    longest: int
    micro_batch_tokens: int
    evaluates_old: bool = True
    mixed: bool = True
    pairs: bool = False
    evaluates_mismatched: bool = False
    reuses_first: bool = False
    turns: int = 0
    environment_processes: int = 0
    response_tokens: int = 0
    group_size: int = 1
    shares_prompts: bool = False
    divergence_bytes: int = 0
    teachers_in_updates: bool = False

    @property
    def updates(self) -> int:
        """Number of optimizer steps of a trained role in a step."""
        return self.update_epochs * -(-self.responses // self.minibatch_size)

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.longest * (1 + self.pairs)

    @property
    def texts_of_a_prompt(self) -> int:
        """Most texts for which a pass computes their prompt once."""
        return self.group_size if self.shares_prompts else 1

    @property
    def shared(self) -> Work:
        """This work with the fewest tokens: each text has its share of the prompt that it shares."""
        prompt = self.longest - self.response_tokens
        return replace(self, longest=self.response_tokens + math.ceil(prompt / self.texts_of_a_prompt))

    def micro_batch_rows(self, texts: int, ranks: int) -> int:
        """Return the rows of a rank's largest micro-batch, if all rows are as long as the longest."""
        return min(math.ceil(texts / ranks), max(1, self.micro_batch_tokens // self.row_tokens))

    def micro_batches(self, texts: int, ranks: int) -> int:
        """Return the number of a rank's micro-batches when ranks share ``texts`` rows."""
        return texts and math.ceil(math.ceil(texts / ranks) / self.micro_batch_rows(texts, ranks))


@dataclass(frozen=True)
class Run:
    """A run to plan.

    Args:
        roles: the models, the actor among them if there is an engine.
        strategy: distribution of the roles.
        work: data of a step.
        engine: engine on the same GPUs; None without one.
        capacity: bytes of a GPU.
        background_save: whether checkpoints are written from a copy in host memory while training continues.
    """

    roles: Sequence[Role]
    strategy: Strategy
    work: Work
    engine: Engine | None = None
    capacity: int = 0
    background_save: bool = False

    @property
    def actor(self) -> Role:
        """The actor."""
        return next(role for role in self.roles if role.name == "actor")

    @property
    def trained(self) -> list[str]:
        """Names of the trained roles."""
        return [role.name for role in self.roles if role.trained]

    def ranks(self, gpus: int) -> int:
        """Return the number of data-parallel ranks on this many GPUs."""
        return gpus // self.strategy.splitting
