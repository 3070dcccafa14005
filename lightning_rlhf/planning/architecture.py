"""A model as the formulas see it: the exact shapes of its parameters, and the widths of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from lightning_rlhf.strategies.tensor_parallel import tensor_parallel_plan


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Args:
        shape: of the whole tensor.
        layer: number of the decoder layer that it belongs to; None outside of the layers (embedding, norm, head).
        split: dimension that tensor parallelism divides; None where every rank has all of it.
        linear: the last part of the name of its linear layer, beside which LoRA may put an adapter; empty where it is
            no such layer's matrix.
    """

    shape: tuple[int, ...]
    layer: int | None
    split: int | None
    linear: str = ""

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layer:
    """Widths of a decoder layer, in numbers per token.

    Args:
        hidden: of the residual stream.
        norms: over the residual stream.
        query: all heads together.
        key: all key heads together; as many values, unless said otherwise.
        heads: attention heads.
        head_norm: whether queries and keys are normalised, as in Qwen3.
        dense: inner width of the gated MLP that every token passes, shared experts included; 0 if there is none.
        expert: inner width of one expert; 0 in a dense layer.
        experts: how many there are.
        active: how many of them a token passes.
        latents: widths that queries, keys and values are squeezed through, each with a norm, as in DeepSeek-V3.
        turned: width of the shared key of such an attention that tells positions; 0 in others.
        value: all heads' values as they are kept together with what became keys; 0 if as wide as keys.
        output: all heads of the attention's output; 0 if as wide as queries.
        post_norms: how many norms are of what a block adds to the residual stream, as in Gemma 2.
        wide_norms: whether norms multiply in float32, as in Gemma 2.
        wide_router: whether the router reads float32, as in DeepSeek-V3.
        gated_shared: whether what the shared expert adds is multiplied by a gate, as in Qwen2-MoE.
        squares: whether the square of attention logits is kept, because nothing computes them in blocks.
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
    turned: int = 0
    value: int = 0
    output: int = 0
    post_norms: int = 0
    wide_norms: bool = False
    wide_router: bool = False
    gated_shared: bool = False
    squares: bool = False

    def cached(self, split: int) -> int:
        """Numbers that an engine's cache has of a token, on each of the GPUs that share it.

        Keys and values, at least one head of each; of latent attention what both are made from, which is not divided.
        """
        if self.turned:
            return self.latents[-1] + self.turned
        return 2 * max(self.key // split, self.query // self.heads)


@dataclass(frozen=True)
class Architecture:
    """What the formulas need of a model.

    Args:
        parameters: all of them, tied ones once.
        layers: the decoder layers in their order.
        vocabulary: logits of a token; 0 for a scalar model.
    """

    parameters: tuple[Parameter, ...]
    layers: tuple[Layer, ...]
    vocabulary: int

    @cached_property
    def elements(self) -> int:
        """Parameters, each number of them counted."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.layers[0].hidden

    @cached_property
    def units(self) -> dict[int | None, list[Parameter]]:
        """Parameters by decoder layer, what is outside of the layers under None: what FSDP gathers together."""
        found: dict[int | None, list[Parameter]] = {}
        for parameter in self.parameters:
            found.setdefault(parameter.layer, []).append(parameter)
        return found


def architecture(
    config: PretrainedConfig, scalar: bool = False, tensor_parallel_size: int = 1, name: str = "model"
) -> Architecture:
    """Read a model's shapes by building it on torch's meta device, where tensors have a shape and no memory.

    Args:
        config: of a decoder-only language model, dense or a mixture of experts.
        scalar: with a head of one output (critic, reward model) in place of the language model's.
        tensor_parallel_size: GPUs that share the matrices of a layer.
        name: of the role, for the sentences.

    Raises:
        ValueError: an architecture that the formulas do not describe, or that is not split into tensors.
    """
    auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    if scalar:
        config.num_labels = 1
    if str(config._attn_implementation).startswith("flash"):  # keeps as little as sdpa, and may not be installed here
        config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    text = config.get_text_config()
    blocks = set(model._no_split_modules or ())
    paths = [path for path, module in model.named_modules() if type(module).__name__ in blocks]
    if len(paths) != text.num_hidden_layers:
        raise ValueError(
            f"the plan knows decoder-only models of {text.num_hidden_layers} alike layers with heads of keys and "
            f"values, and {type(model).__name__} is made otherwise"
        )
    plan = tensor_parallel_plan(name, model, tensor_parallel_size)
    parameters = tuple(_parameter(name, model, paths, plan) for name, _ in model.named_parameters())
    layers = tuple(_layer(text, dict(model.get_submodule(path).named_parameters())) for path in paths)
    return Architecture(parameters, layers, 0 if scalar else text.vocab_size)


def _parameter(name: str, model: nn.Module, paths: list[str], plan: dict[nn.Module, ParallelStyle]) -> Parameter:
    value = model.get_parameter(name)
    layer = next((number for number, path in enumerate(paths) if name.startswith(f"{path}.")), None)
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    style, split = plan.get(module), None
    if isinstance(style, ColwiseParallel):
        split = 0
    elif isinstance(style, RowwiseParallel) and leaf == "weight":
        split = 1
    is_matrix = layer is not None and leaf == "weight" and isinstance(module, nn.Linear)
    return Parameter(tuple(value.shape), layer, split, owner.rpartition(".")[2] if is_matrix else "")


def _layer(config: Any, parameters: dict[str, nn.Parameter]) -> Layer:
    down = [value.shape for name, value in parameters.items() if "down_proj" in name and not name.endswith("bias")]
    if not down:
        raise ValueError(
            f"the plan knows layers whose MLP has gate_proj, up_proj and down_proj, as those of Llama, Qwen and "
            f"Mixtral; the layers of {config.model_type!r} have other parts"
        )
    expert = next((shape for shape in down if len(shape) == 3), None)
    norms = [name for name, value in parameters.items() if "norm" in name and "self_attn" not in name]
    return Layer(
        hidden=config.hidden_size,
        norms=len(norms),
        heads=config.num_attention_heads,
        head_norm=any("q_norm" in name for name in parameters),
        dense=sum(shape[1] for shape in down if len(shape) == 2),
        expert=0 if expert is None else expert[2],
        experts=0 if expert is None else expert[0],
        active=0 if expert is None else config.num_experts_per_tok,
        post_norms=len(norms) - 2,
        wide_norms=config.model_type.startswith("gemma"),
        wide_router=expert is not None and config.model_type.startswith("deepseek"),
        gated_shared=any("shared_expert_gate" in name for name in parameters),
        squares=config._attn_implementation == "eager",
        **(_latent_attention(config) if getattr(config, "kv_lora_rank", None) else _attention(config)),
    )


def _attention(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {"query": heads * size, "key": (getattr(config, "num_key_value_heads", None) or heads) * size}


def _latent_attention(config: Any) -> dict[str, Any]:
    heads, plain, turned = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    return {
        "query": heads * (plain + turned),
        "key": heads * (plain + turned),
        "value": heads * (plain + config.v_head_dim),
        "output": heads * config.v_head_dim,
        "latents": (*([config.q_lora_rank] if config.q_lora_rank else []), config.kv_lora_rank),
        "turned": turned,
    }
