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
        key: all key heads together; as many values.
        heads: attention heads.
        head_norm: whether queries and keys are normalised, as in Qwen3.
        dense: inner width of the gated MLP that every token passes, shared experts included; 0 if there is none.
        expert: inner width of one expert; 0 in a dense layer.
        experts: how many there are.
        active: how many of them a token passes.
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
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    text = config.get_text_config()
    blocks = set(model._no_split_modules or ())
    paths = [path for path, module in model.named_modules() if type(module).__name__ in blocks]
    if len(paths) != text.num_hidden_layers or hasattr(text, "kv_lora_rank"):
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
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    down = [value.shape for name, value in parameters.items() if "down_proj" in name and not name.endswith("bias")]
    if not down:
        raise ValueError(
            f"the plan knows layers whose MLP has gate_proj, up_proj and down_proj, as those of Llama, Qwen and "
            f"Mixtral; the layers of {config.model_type!r} have other parts"
        )
    expert = next((shape for shape in down if len(shape) == 3), None)
    return Layer(
        hidden=hidden,
        norms=sum("norm" in name and tuple(value.shape) == (hidden,) for name, value in parameters.items()),
        query=heads * size,
        key=(getattr(config, "num_key_value_heads", None) or heads) * size,
        heads=heads,
        head_norm=any("q_norm" in name for name in parameters),
        dense=sum(shape[1] for shape in down if len(shape) == 2),
        expert=0 if expert is None else expert[2],
        experts=0 if expert is None else expert[0],
        active=0 if expert is None else config.num_experts_per_tok,
    )
