"""What a plan is made of: strategy, roles, engine and work, and what each number is stored in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from lightning_rlhf.planning.architecture import Architecture

Kind = Literal["single", "ddp", "fsdp", "zero"]
_KINDS: dict[str, Kind] = {"rlhf_single": "single", "rlhf_ddp": "ddp", "rlhf_fsdp": "fsdp"}
_DEEPSPEED = re.compile(r"rlhf_deepspeed_stage_([123])")


@dataclass(frozen=True)
class Zero:
    """Sizes of DeepSpeed's buffers, in numbers; its defaults.

    Args:
        bucket: gradients that are summed together; None is 5 x 10^8, or all of a role where it has fewer.
        live: parameters that stage 3 keeps gathered.
        prefetch: parameters that it gathers ahead.
        persistent: parameters smaller than this stay gathered.
    """

    bucket: int | None = None
    live: int = 1_000_000_000
    prefetch: int = 50_000_000
    persistent: int = 100_000

    def bucket_of(self, gradients: int) -> int:
        """The bucket of a role with so many gradients."""
        return min(gradients, 500_000_000) if self.bucket is None else self.bucket


@dataclass(frozen=True)
class Strategy:
    """How models lie over GPUs.

    Args:
        name: as a configuration says it.
        kind: who does it: one process, DDP, FSDP2, or DeepSpeed's ZeRO.
        stage: of ZeRO, 1 to 3; 0 elsewhere.
        tensor_parallel_size: GPUs that share the matrices of a layer, at least 1.
        checkpointing: whether a layer's activations are computed again in the backward pass.
        reduce_every: whether FSDP sums gradients with every micro-batch, not only with the last of an update.
        offload_optimizer: whether gradients and optimizer state lie in the host's memory.
        offload_params: whether parameters do.
        offload_frozen: whether those of frozen roles do; None as ``offload_params``.
        zero: sizes of DeepSpeed's buffers.
    """

    name: str
    kind: Kind
    stage: int = 0
    tensor_parallel_size: int = 1
    checkpointing: bool = False
    reduce_every: bool = True
    offload_optimizer: bool = False
    offload_params: bool = False
    offload_frozen: bool | None = None
    zero: Zero = Zero()

    @property
    def shards_weights(self) -> bool:
        """Whether no GPU holds a model whole."""
        return self.kind == "fsdp" or self.stage == 3


def strategy(name: str, **options: Any) -> Strategy:
    """The strategy of a name.

    Args:
        name: ``rlhf_single``, ``rlhf_ddp``, ``rlhf_fsdp`` or ``rlhf_deepspeed_stage_{1,2,3}``; the last two also with
            ``_offload``.
        **options: further fields of :class:`Strategy`.

    Raises:
        ValueError: another name, or tensor parallelism where there is none.
    """
    plain, offload = name.removesuffix("_offload"), name.endswith("_offload")
    found = _DEEPSPEED.fullmatch(plain)
    if (plain not in _KINDS and found is None) or (offload and plain in ("rlhf_single", "rlhf_ddp")):
        raise ValueError(
            f"the plan knows rlhf_single, rlhf_ddp, rlhf_fsdp and rlhf_deepspeed_stage_1, _2, _3, the last four also "
            f"with _offload; got strategy {name!r}"
        )
    stage = int(found[1]) if found else 0
    if options.get("tensor_parallel_size", 1) > 1 and plain != "rlhf_fsdp":
        raise ValueError(f"{name} splits no tensors: take rlhf_fsdp, or tensor_parallel_size 1")
    if offload:
        options = {"offload_optimizer": True, "offload_params": plain == "rlhf_fsdp" or stage == 3} | options
    return Strategy(name, "zero" if found else _KINDS[plain], stage, **options)


@dataclass(frozen=True)
class Precision:
    """Bytes of a number, by what it is.

    Args:
        weights: parameters as they rest, and gradients where nothing else is said.
        compute: of layers and of what they keep for the backward pass.
        reduce: gradients while they are summed over ranks.
        shard: gradients where each rank keeps a part of them.
        master: a copy of the parameters beside them, which the optimizer changes; 0 where it changes themselves.
        moment: each of Adam's two.
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
    """What numbers are stored in.

    torch's AdamW keeps moments in the dtype of the parameters. Under FSDP2's mixed precision parameters are float32, a
    layer is gathered in bfloat16, and gradients are summed in float32. DeepSpeed computes with bfloat16 weights, keeps
    its part of the gradients in float32, and float32 masters and moments ("ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models", Rajbhandari et al. 2020, section 3.1); masters even where the weights are float32.

    Args:
        strategy: who stores them.
        dtype: of the model's source, float32 or bfloat16.
        mixed: whether the Trainer's precision is ``bf16-mixed``.
    """
    half = dtype == "bfloat16"
    compute = 2 if half or mixed else 4
    if strategy.kind == "zero":
        return Precision(compute, compute, compute, shard=4, master=4, moment=4)
    weights = 2 if half else 4
    reduce = 4 if strategy.kind == "fsdp" else weights
    autocast = mixed and not half and strategy.kind != "fsdp"
    return Precision(weights, compute, reduce, shard=weights, master=0, moment=weights, autocast=autocast)


@dataclass(frozen=True)
class Role:
    """One model of a run.

    Args:
        name: actor, critic, ref or reward_model.
        model: its shapes.
        trained: whether it has gradients and an optimizer.
        dtype: of its source, float32 or bfloat16.
        lora_rank: of the adapters that alone are trained; 0 trains all parameters.
        lora_targets: names of the linear layers that have adapters; None is all of them.
        is_reference_too: whether the actor without its adapters is the reference, and is asked as that.
    """

    name: str
    model: Architecture
    trained: bool
    dtype: str = "float32"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] | None = None
    is_reference_too: bool = False

    @property
    def adapters(self) -> int:
        """Parameters that LoRA trains; 0 without it.

        rank x (inputs + outputs) for each adapted matrix (Hu et al. 2021), and the head of a scalar model.
        """
        if not self.lora_rank:
            return 0
        linear = [parameter for parameter in self.model.parameters if parameter.linear]
        shapes = [own.shape for own in linear if self.lora_targets is None or own.linear in self.lora_targets]
        head = 0 if self.model.vocabulary else self.model.hidden
        return sum(self.lora_rank * (outputs + inputs) for outputs, inputs in shapes) + head


@dataclass(frozen=True)
class Engine:
    """What generates, on the GPUs of the trainer.

    Args:
        share: of a GPU's memory that it takes for itself (vLLM's ``gpu_memory_utilization``); 0 takes what it needs.
        tensor_parallel_size: GPUs that share one engine, at least 1.
        sequences: generated at once where it takes what it needs.
        dtype: dtype of its weights and its cache; None is that of the actor's source.
    """

    share: float
    tensor_parallel_size: int = 1
    sequences: int = 1
    dtype: str | None = None

    def number(self, actor: Role) -> int:
        """Bytes of a number."""
        return 2 if (self.dtype or actor.dtype) == "bfloat16" else 4


@dataclass(frozen=True)
class Work:
    """What a step does, over all ranks.

    Args:
        responses: texts, or pairs of them, that a step learns from.
        minibatch_size: texts or pairs of one optimizer step.
        update_epochs: times that every text is learnt from.
        longest: tokens of the longest text, prompt included.
        micro_batch_tokens: most padded tokens in one forward pass.
        asks_old: whether the actor is asked once more before the first update.
        mixed: whether the Trainer's precision is ``bf16-mixed``.
        pairs: whether a row is two texts, padded to the longer one, which go through the models together.
        asks_mismatched: whether actor and reference are asked once more, of prompts with other answers, as KTO does.
    """

    responses: int
    minibatch_size: int
    update_epochs: int
    longest: int
    micro_batch_tokens: int
    asks_old: bool = True
    mixed: bool = True
    pairs: bool = False
    asks_mismatched: bool = False

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.longest * (1 + self.pairs)

    def micro_batch_rows(self, texts: int, ranks: int) -> int:
        """Rows of the largest micro-batch of a rank, all of them as long as the longest."""
        return min(math.ceil(texts / ranks), max(1, self.micro_batch_tokens // self.row_tokens))

    def micro_batches(self, texts: int, ranks: int) -> int:
        """Micro-batches that a rank makes of its share of some texts."""
        return math.ceil(math.ceil(texts / ranks) / self.micro_batch_rows(texts, ranks))
