"""LoRA: trains low-rank adapters on top of a model's frozen weights, with the layers of peft."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import MissingPackageError, UsageError
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.models.classes import layers_read_by_kernels, text_model_of
from lightning_rlhf.models.tensors import whole_tensors

NAME = "default"  # name of the adapter in peft
_EXPERT_LAYERS = {"gate_proj", "up_proj", "down_proj"}
_BASE = ".base_layer."
_DOWN = f".lora_A.{NAME}.weight"
UP = f".lora_B.{NAME}.weight"
MAGNITUDE = f".lora_magnitude_vector.{NAME}.weight"


@dataclass(frozen=True)
class LoRA:
    """Adds low-rank adapters, so that an adapted layer computes ``W x + (alpha / rank) B A x``.

    See "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al. 2021, sec. 4.1. W is frozen. A (rank by inputs)
    is drawn from the run's seed, and B (outputs by rank) starts at zero, so your model initially equals its source.

    The reference of a run is the actor with its adapters switched off. If the actor starts from an ``adapter`` of its
    source, a ``ref`` with the same source keeps a frozen copy of that adapter, and a ``ref`` with the path alone is the
    base.

    Adapters of bfloat16 weights are float32. Under DeepSpeed they are bfloat16 with float32 master weights. You cannot
    train embeddings or heads beside them (``modules_to_save`` of peft), because the reference would be another model,
    and vLLM's adapters contain no such weights.

    Args:
        rank: rank of the product B A, at least 1.
        alpha: numerator of the factor alpha / rank, at least 1.
        target_modules: ends of the names of linear layers, for example ``[q_proj, v_proj]`` or
            ``[layers.0.self_attn.q_proj]``. None adapts all linear layers of the backbone. Embedding and head are never
            adapted, nor are ``dt_proj`` and ``out_proj`` of Mamba, because its kernels read the weights directly.
        exclude_modules: ends of the names of layers that get no adapter, for example ``[down_proj]`` or
            ``[layers.0.self_attn.q_proj]``. None excludes none.
        rslora: whether the factor is ``alpha / sqrt(rank)``. The size of a step then does not depend on the rank. See
            "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", Kalajdzievski 2023.
        dora: whether to train the length of each row of the weight as a vector beside the adapters. See "DoRA:
            Weight-Decomposed Low-Rank Adaptation", Liu et al. 2024, equation 5. Works with merged weights in the
            engine, not under ZeRO-3 or tensor parallelism.
        dropout: share of an adapter's inputs set to zero in training, in [0, 1). Use it only for SFT, preferences and
            reward models. In reinforcement learning, both log-probabilities of a ratio must come from the same network.

    Raises:
        ModuleNotFoundError: peft is not installed.
        ValueError: an argument is out of its range.
    """

    rank: int
    alpha: int
    target_modules: list[str] | None = None
    exclude_modules: list[str] | None = None
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("alpha", self.alpha)):
            if value < 1:
                raise UsageError(f"lora: {name} must be at least 1, got {value}")
        if self.target_modules is not None and not self.target_modules:
            raise UsageError("lora: target_modules is empty; leave it out to adapt all linear layers")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"lora: dropout must be at least 0 and below 1, got {self.dropout}")
        if importlib.util.find_spec("peft") is None:
            raise MissingPackageError("lora needs peft, which is not installed: pip install 'lightning-rlhf[peft]'")

    @property
    def scaling(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def add_to(self, lm: PreTrainedModel) -> None:
        """Freeze a model and add float32 adapters to the linear layers of its backbone.

        Args:
            lm: model with a head; the head of a scalar model is new, and is trained in float32.

        Raises:
            ValueError: a target is not a linear layer of the backbone, or peft would also adapt stacked experts.
        """
        if importlib.util.find_spec("bitsandbytes") is not None:
            the_offered("quantization").bitsandbytes()  # before peft imports it
        from peft import inject_adapter_in_model

        layers = self.targets(lm)
        config = self.peft_config(
            self.target_modules or layers, transposed=any(isinstance(layer, Conv1D) for layer in layers.values())
        )
        config.exclude_modules = layers_read_by_kernels(text_model_of(lm)) | set(self.exclude_modules or ()) or None
        lm.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(run_seed(), "adapters", type(lm).__name__))
            try:
                inject_adapter_in_model(config, text_model_of(lm), NAME)
            except ValueError as error:
                reason = str(error).splitlines()[0]
                raise UsageError(
                    f"lora: peft cannot adapt {type(lm).__name__}, set target_modules to other layers: {reason}"
                ) from error
        if any(f"{_BASE}lora_" in name for name, _ in lm.named_parameters()):
            raise UsageError(
                f"lora: with these target_modules peft also adapts the experts of {type(lm).__name__}, which are "
                f"stacked in one tensor and cannot be merged: set target_modules to some of "
                f"{', '.join(sorted(layers.keys() - _EXPERT_LAYERS))}"
            )
        for name, parameter in lm.named_parameters():
            if is_adapter(name):
                parameter.data = parameter.data.float()  # bfloat16 would round small updates away
            if name.endswith(MAGNITUDE):
                layer: Any = lm.get_submodule(name.removesuffix(MAGNITUDE))
                parameter.data = _lengths(layer, layer.get_base_layer().weight.float())
        head: Any = getattr(lm, "score", None)
        if head is not None:
            head.float().requires_grad_(True)

    def targets(self, lm: PreTrainedModel) -> dict[str, nn.Module]:
        """Return the layers to adapt by the last part of their name; of layers with equal names, the last one.

        Args:
            lm: model without adapters.

        Raises:
            ValueError: a target or an exclusion is not a linear layer of the backbone, or no layer is left.
        """
        backbone = text_model_of(lm)
        left_out = layers_read_by_kernels(backbone)
        linear = {
            name: layer
            for name, layer in backbone.named_modules()
            if isinstance(layer, (nn.Linear, Conv1D)) and name not in left_out
        }
        known = {_last_part(name): layer for name, layer in linear.items()}
        if not known:
            raise UsageError(f"lora: {type(lm).__name__} has no linear layers to adapt; train it without lora")
        unknown = {
            option: [end for end in getattr(self, option) or () if not any(_ends(name, end) for name in linear)]
            for option in ("target_modules", "exclude_modules")
        }
        for option, names in unknown.items():
            if names:
                near = difflib.get_close_matches(names[0], known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ";"
                raise UsageError(
                    f"lora: {option} {', '.join(names)} not found among the linear layers of "
                    f"{type(lm).__name__}{hint} available: {', '.join(sorted(known))}"
                )
        targets: dict[str, nn.Module] = {
            _last_part(name): layer
            for name, layer in linear.items()
            if not any(_ends(name, end) for end in self.exclude_modules or ())
            and (self.target_modules is None or any(_ends(name, end) for end in self.target_modules))
        }
        if not targets:
            raise UsageError("lora: exclude_modules leaves no layer to adapt: exclude fewer")
        return targets

    def peft_config(self, targets: Iterable[str], transposed: bool) -> Any:
        """Convert to peft's configuration.

        Args:
            targets: last parts of the names of the layers to adapt.
            transposed: whether the weights of these layers are inputs x outputs, as in GPT-2.
        """
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=sorted(set(targets)),
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            use_dora=self.dora,
            bias="none",
            task_type="CAUSAL_LM",
            fan_in_fan_out=transposed,
        )


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _ends(name: str, end: str) -> bool:
    """Return whether the last parts of a name are given ones."""
    return f".{name}".endswith(f".{end}")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is part of an adapter.

    Args:
        name: parameter name as in ``named_parameters``.
    """
    return name.endswith((_DOWN, UP, MAGNITUDE))


def base_name(name: str) -> str:
    """Return the name of a parameter before adapters were added.

    Args:
        name: parameter name as in ``named_parameters``.
    """
    return name.replace(_BASE, ".")


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable adapters, so that adapted layers compute ``W x``.

    This sets a private flag of peft, because peft's context manager also changes ``requires_grad``, which must not
    change once a strategy has wrapped the model. tests/models/test_lora.py fails if peft renames the flag.

    Args:
        model: model with adapters.

    Raises:
        ValueError: the model has no adapters.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers:
        raise UsageError(f"{type(model).__name__} has no adapters to disable")
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapted_parts(layer: Any, outputs: bool) -> list[nn.Module]:
    """Return the linear layers to split for tensor parallelism: the layer, or its base and one adapter matrix.

    Args:
        layer: linear layer with or without an adapter.
        outputs: whether the layer's outputs are split; False splits its inputs.
    """
    if not hasattr(layer, "base_layer"):
        return [layer]
    return [layer.base_layer, (layer.lora_B if outputs else layer.lora_A)[NAME]]


@torch.no_grad()
def merged(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters with adapters merged: ``W + (alpha / rank) B A`` for each adapted W.

    With float32 adapters, the sum is rounded once, to the dtype of W, as in peft's ``merge_and_unload``. With DoRA, the
    rows of the sum then get their trained lengths. The model does not change, and at most one layer's weight is copied
    at a time.

    Args:
        model: model of the parameters; its adapted layers contain the factors alpha / rank.
        parameters: names and full tensors, in the order of ``named_parameters``; each tensor is valid until the next
            one.

    Yields:
        (name without adapters, full tensor); each tensor is valid until the next one.
    """
    pending: dict[str, Tensor] = {}
    down = up = torch.empty(0)
    for name, tensor in parameters:
        if _BASE in name:
            pending[name] = tensor.clone()  # modified below; the original's memory may be reused
            continue
        if name.endswith(_DOWN):
            down = tensor.clone()
            continue
        if not is_adapter(name):
            yield name, tensor
            continue
        if name.endswith(UP):
            up = tensor
            path, magnitude = name.removesuffix(UP), None
        else:
            path, magnitude = name.removesuffix(MAGNITUDE), tensor
        layer: Any = model.get_submodule(path)
        if layer.lora_magnitude_vector and magnitude is None:  # comes next
            up = tensor.clone()
            continue
        _merge(layer, pending[f"{path}{_BASE}weight"], down, up, magnitude)
        yield from ((base_name(key), value) for key, value in pending.items())
        pending.clear()


def _merge(layer: Any, weight: Tensor, down: Tensor, up: Tensor, magnitude: Tensor | None) -> None:
    """Add ``(alpha / rank) B A`` to a weight in place, computed in float32: CPUs are slow and imprecise in bfloat16."""
    product = (up.float() @ down.float()) * layer.scaling[NAME]
    if layer.fan_in_fan_out:
        product = product.T
    if magnitude is None:
        weight += product.to(up.dtype)
        return
    summed = weight.to(product.dtype) + product
    factors = magnitude / _lengths(layer, summed)
    weight.copy_(summed * (factors if layer.fan_in_fan_out else factors.unsqueeze(1)))


def _lengths(layer: Any, weight: Tensor) -> Tensor:
    """Return the lengths of a weight's rows, one for each output of the layer."""
    return torch.linalg.vector_norm(weight.detach(), dim=0 if layer.fan_in_fan_out else 1)


def merged_weights(lm: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return the merged weights of :func:`merged` by name; None for a model without adapters."""
    if not any(is_adapter(name) for name, _ in lm.named_parameters()):
        return None
    return dict(merged(lm, whole_tensors(lm)))


def frozen_names(module: nn.Module) -> set[str]:
    """Return the ``state_dict`` names of the parameters that are not trained."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def check_adapters(sources: dict[str, Any], stored: dict[str, Any]) -> None:
    """Validate that a run has the adapter settings of its checkpoint.

    Args:
        sources: model sources by role.
        stored: result of :func:`adapter_settings` in the checkpoint.

    Raises:
        ValueError: the settings differ, even if the shapes of the weights are equal.
    """
    ours = adapter_settings(sources)
    for name in sorted(ours.keys() | stored.keys()):
        if ours.get(name) != stored.get(name):
            raise UsageError(
                f"the checkpoint was written with lora {stored.get(name, 'null')} for the {name}, but this run has "
                f"{ours.get(name, 'null')}: use the checkpoint's settings, or start a new run from the exported model"
            )


def adapter_settings(sources: dict[str, Any]) -> dict[str, Any]:
    """Return the adapter settings of each role with adapters as plain values, for a checkpoint.

    Settings that were added in later releases are left out if they have their defaults, so that earlier checkpoints
    match.

    Args:
        sources: model sources by role.
    """
    return {name: _plain(source.lora) for name, source in sources.items() if source.lora is not None}


def _plain(lora: LoRA) -> dict[str, Any]:
    values = {each.name: (getattr(lora, each.name), each.default) for each in fields(lora)}
    always = ("rank", "alpha", "target_modules")
    return {name: value for name, (value, default) in values.items() if name in always or value != default}
