"""Shapes of a model: its parameters, and the widths of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers import PretrainedConfig

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models import packed_attention
from lightning_rlhf.models.classes import freeze_towers, language_model_class, scalar_model_class, text_model_of
from lightning_rlhf.strategies.sequence_parallel import check_sequence_parallel, supports_sequence_parallel
from lightning_rlhf.strategies.tensor_parallel import tensor_parallel_plan


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Args:
        shape: shape of the whole tensor.
        layer: index of its decoder layer; None outside the layers (embedding, final norm, head).
        split: dimension that tensor parallelism splits; None for a parameter that is not split.
        linear: last part of the name of its linear layer, for LoRA targets; empty for other parameters.
        is_frozen: whether it is never trained, as in the image encoder of a vision-language model.
    """

    shape: tuple[int, ...]
    layer: int | None
    split: int | None
    linear: str = ""
    is_frozen: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layer:
    """Widths of a decoder layer, in elements per token.

    Args:
        hidden: width of the residual stream.
        norms: number of norms over the residual stream.
        query: width of all query heads together.
        key: width of all key heads together.
        heads: attention heads.
        head_norm: whether queries and keys are normalised, as in Qwen3.
        dense: inner width of the gated MLP that every token passes, shared experts included; 0 without one.
        expert: inner width of one expert; 0 in a dense layer.
        experts: number of experts.
        active: number of experts that a token passes.
        latents: widths of the normalised latents of latent attention (queries; keys and values), as in DeepSeek-V3.
        rotary: width of the rotary key that all heads of latent attention share; 0 for other attention.
        value: width of all value heads and of the projection that they share with the keys; 0 if equal to ``key``.
        output: width of all heads of the attention's output; 0 if equal to ``query``.
        post_norms: number of norms over the output of attention or MLP before it is added, as in Gemma 2.
        wide_norms: whether norms multiply in float32, as in Gemma 2.
        wide_router: whether the router computes in float32, as in DeepSeek-V3.
        gated_shared: whether the output of the shared expert is multiplied by a gate, as in Qwen2-MoE.
        eager: whether attention keeps its (length, length) logits, because no fused kernel computes it.
        packed: whether attention copies its outputs into one row.
    """

    hidden: int
    norms: int
    query: int
    key: int
    heads: int
    head_norm: bool
    dense: int
    expert: int = 0
    experts: int = 0
    active: int = 0
    latents: tuple[int, ...] = ()
    rotary: int = 0
    value: int = 0
    output: int = 0
    post_norms: int = 0
    wide_norms: bool = False
    wide_router: bool = False
    gated_shared: bool = False
    eager: bool = False
    packed: bool = False

    def cache_elements(self, split: int) -> int:
        """Return the elements per token of an engine's KV cache on each of ``split`` GPUs.

        Keys and values of at least one head each. Latent attention caches the latent and the rotary key, which are not
        split.
        """
        if self.rotary:
            return self.latents[-1] + self.rotary
        return 2 * max(self.key // split, self.query // self.heads)


@dataclass(frozen=True)
class Architecture:
    """Shapes of a model.

    Args:
        parameters: all parameters; tied parameters are listed once.
        layers: the decoder layers in their order.
        vocabulary: number of logits per token; 0 for a scalar model.
        sequence_parallel: whether processes can divide the tokens of its rows.
    """

    parameters: tuple[Parameter, ...]
    layers: tuple[Layer, ...]
    vocabulary: int
    sequence_parallel: bool = False

    @cached_property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Parameters of a trained role that are trained."""
        return tuple(parameter for parameter in self.parameters if not parameter.is_frozen)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.layers[0].hidden

    @cached_property
    def units(self) -> dict[int | None, list[Parameter]]:
        """Parameters that FSDP gathers together, by decoder layer; None for parameters outside the layers."""
        units: dict[int | None, list[Parameter]] = {}
        for parameter in self.parameters:
            units.setdefault(parameter.layer, []).append(parameter)
        return units


def architecture(
    config: PretrainedConfig,
    scalar: bool = False,
    tensor_parallel_size: int = 1,
    name: str = "model",
    train_vision: bool = False,
    sequence_parallel_size: int = 1,
) -> Architecture:
    """Read a model's shapes by building it on torch's meta device, without memory for its weights.

    Args:
        config: configuration of a decoder-only language model, dense or a mixture of experts.
        scalar: whether the model has a head with one output (critic, reward model).
        tensor_parallel_size: GPUs that split the matrices of a layer.
        name: name of the role, for error messages.
        train_vision: whether the image encoder of a vision-language model is trained.
        sequence_parallel_size: GPUs that divide the tokens of a row.

    Raises:
        ValueError: the formulas do not describe the architecture, or its tensors or rows cannot be divided.
    """
    auto = scalar_model_class(config) if scalar else language_model_class(config)
    if scalar:
        config.num_labels = 1
    if str(config._attn_implementation).startswith("flash"):  # same memory as sdpa; may not be installed
        config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if not train_vision:
        freeze_towers(model)
    text = config.get_text_config()
    blocks = set(model._no_split_modules or ())  # names of the classes of decoder layers
    in_text = set(text_model_of(model).modules())
    paths = [path for path, module in model.named_modules() if type(module).__name__ in blocks and module in in_text]
    if len(paths) != text.num_hidden_layers:
        raise UsageError(
            f"plan supports decoder-only models with {text.num_hidden_layers} similar attention layers; "
            f"{type(model).__name__} has a different structure"
        )
    plan = tensor_parallel_plan(name, model, tensor_parallel_size)
    check_sequence_parallel(name, model, sequence_parallel_size, tensor_parallel_size)
    parameters = tuple(_parameter(key, model, paths, plan) for key, _ in model.named_parameters())
    layers = tuple(_layer(text, dict(model.get_submodule(path).named_parameters())) for path in paths)
    return Architecture(parameters, layers, 0 if scalar else text.vocab_size, supports_sequence_parallel(model))


def _parameter(name: str, model: nn.Module, paths: list[str], plan: dict[nn.Module, ParallelStyle]) -> Parameter:
    value = model.get_parameter(name)
    layer = next((number for number, path in enumerate(paths) if name.startswith(f"{path}.")), None)
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    style = plan.get(module)
    split = None
    if isinstance(style, ColwiseParallel):
        split = 0
    elif isinstance(style, RowwiseParallel) and leaf == "weight":
        split = 1
    is_matrix = layer is not None and leaf == "weight" and isinstance(module, nn.Linear)
    linear = owner.rpartition(".")[2] if is_matrix else ""
    return Parameter(tuple(value.shape), layer, split, linear, is_frozen=not value.requires_grad)


def _layer(config: Any, parameters: dict[str, nn.Parameter]) -> Layer:
    down = [value.shape for name, value in parameters.items() if "down_proj" in name and not name.endswith("bias")]
    if not down:
        raise UsageError(
            f"plan supports layers whose MLP has gate_proj, up_proj and down_proj, as in Llama, Qwen and Mixtral; "
            f"the layers of {config.model_type!r} have other parts"
        )
    # Experts are stacked: (experts, hidden, inner).
    experts, _, expert = next((shape for shape in down if len(shape) == 3), (0, 0, 0))
    norms = [name for name, value in parameters.items() if "norm" in name and "self_attn" not in name]
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return Layer(
        hidden=config.hidden_size,
        norms=len(norms),
        heads=config.num_attention_heads,
        head_norm=any("q_norm" in name for name in parameters),
        dense=sum(shape[1] for shape in down if len(shape) == 2),
        expert=expert,
        experts=experts,
        active=config.num_experts_per_tok if experts else 0,
        post_norms=len(norms) - 2,  # beyond those before attention and before the MLP
        wide_norms=config.model_type.startswith("gemma"),
        wide_router=experts > 0 and config.model_type.startswith("deepseek"),
        gated_shared=any("shared_expert_gate" in name for name in parameters),
        eager=config._attn_implementation == "eager" or is_capped,
        packed=config.get_text_config()._attn_implementation == packed_attention.NAME,
        **(_latent_attention(config) if getattr(config, "kv_lora_rank", None) else _attention(config)),
    )


def _attention(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {"query": heads * size, "key": (getattr(config, "num_key_value_heads", None) or heads) * size}


def _latent_attention(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    plain = config.qk_nope_head_dim
    rotary = config.qk_rope_head_dim
    return {
        "query": heads * (plain + rotary),
        "key": heads * (plain + rotary),
        "value": heads * (plain + config.v_head_dim),
        "output": heads * config.v_head_dim,
        "latents": (*([config.q_lora_rank] if config.q_lora_rank else []), config.kv_lora_rank),
        "rotary": rotary,
    }
