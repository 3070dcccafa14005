"""LoRA: trains low-rank adapters on top of a model's frozen weights, with the layers of peft."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.expected_errors import MissingPackageError, UsageError
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.models.classes import text_model_of
from lightning_rlhf.models.tensors import whole_tensors

_NAME = "default"  # name of the adapter in peft
_EXPERT_LAYERS = {"gate_proj", "up_proj", "down_proj"}
_BASE = ".base_layer."
_DOWN = f".lora_A.{_NAME}.weight"
_UP = f".lora_B.{_NAME}.weight"


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: an adapted layer computes ``W x + (alpha / rank) B A x``.

    See "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al. 2021, sec. 4.1. W is frozen; A (rank by inputs)
    is drawn from the run's seed, B (outputs by rank) starts at zero, so that the model initially equals its source.
    Dropout is 0, because both log-probabilities of a ratio must come from the same network.

    Args:
        rank: rank of the product B A, at least 1.
        alpha: numerator of the factor alpha / rank, at least 1.
        target_modules: last parts of the names of linear layers, for example ``[q_proj, v_proj]``; None adapts all
            linear layers of the backbone. Embedding and head are never adapted.

    Raises:
        ModuleNotFoundError: peft is not installed.
        ValueError: an argument is out of its range.
    """

    rank: int
    alpha: int
    target_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("alpha", self.alpha)):
            if value < 1:
                raise UsageError(f"lora: {name} must be at least 1, got {value}")
        if self.target_modules is not None and not self.target_modules:
            raise UsageError("lora: target_modules is empty; leave it out to adapt all linear layers")
        if importlib.util.find_spec("peft") is None:
            raise MissingPackageError("lora needs peft, which is not installed: pip install 'lightning-rlhf[peft]'")

    def add_to(self, lm: PreTrainedModel) -> None:
        """Freeze a model and add float32 adapters to the linear layers of its backbone.

        Args:
            lm: model with a head; the head of a scalar model is new and stays trainable.

        Raises:
            ValueError: a target is not a linear layer of the backbone, or peft would also adapt stacked experts.
        """
        from peft import inject_adapter_in_model

        layers = self.targets(lm)
        config = self.peft_config(layers, transposed=any(isinstance(layer, Conv1D) for layer in layers.values()))
        lm.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(run_seed(), "adapters", type(lm).__name__))
            inject_adapter_in_model(config, text_model_of(lm), _NAME)
        if any(f"{_BASE}lora_" in name for name, _ in lm.named_parameters()):
            raise UsageError(
                f"lora: with these target_modules peft also adapts the experts of {type(lm).__name__}, which are "
                f"stacked in one tensor and cannot be merged: set target_modules to some of "
                f"{', '.join(sorted(layers.keys() - _EXPERT_LAYERS))}"
            )
        for name, parameter in lm.named_parameters():
            if is_adapter(name):
                parameter.data = parameter.data.float()  # bfloat16 would round small updates away
        head: Any = getattr(lm, "score", None)
        if head is not None:
            head.requires_grad_(True)

    def targets(self, lm: PreTrainedModel) -> dict[str, nn.Module]:
        """Return the layers to adapt by the last part of their name; of layers with equal names, the last one.

        Args:
            lm: model without adapters.

        Raises:
            ValueError: a target is not a linear layer of the backbone, or the backbone has no linear layers.
        """
        named = text_model_of(lm).named_modules()
        known = {_last_part(name): layer for name, layer in named if isinstance(layer, (nn.Linear, Conv1D))}
        if not known:
            raise UsageError(f"lora: {type(lm).__name__} has no linear layers to adapt; train it without lora")
        if unknown := sorted(set(self.target_modules or ()) - known.keys()):
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            raise UsageError(
                f"lora: target_modules {', '.join(unknown)} not found among the linear layers of "
                f"{type(lm).__name__}{hint} available: {', '.join(sorted(known))}"
            )
        return {name: known[name] for name in self.target_modules or known}

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
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            fan_in_fan_out=transposed,
        )


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def is_adapter(name: str) -> bool:
    """Return whether a parameter is part of an adapter.

    Args:
        name: parameter name as in ``named_parameters``.
    """
    return name.endswith((_DOWN, _UP))


def base_name(name: str) -> str:
    """Return the name of a parameter before adapters were added.

    Args:
        name: parameter name as in ``named_parameters``.
    """
    return name.replace(_BASE, ".")


def peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files.

    Args:
        name: parameter name as in ``named_parameters``.
    """
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


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
    return [layer.base_layer, (layer.lora_B if outputs else layer.lora_A)[_NAME]]


@torch.no_grad()
def merged(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters with adapters merged: ``W + (alpha / rank) B A`` for each adapted W.

    With float32 adapters, the sum is rounded once, to the dtype of W, as in peft's ``merge_and_unload``. The model does
    not change, and at most one layer's weight is copied at a time.

    Args:
        model: model of the parameters; its adapted layers contain the factors alpha / rank.
        parameters: names and full tensors, in the order of ``named_parameters``; each tensor is valid until the next
            one.

    Yields:
        (name without adapters, full tensor); each tensor is valid until the next one.
    """
    pending: dict[str, Tensor] = {}
    down = torch.empty(0)
    for name, tensor in parameters:
        if _BASE in name:
            pending[name] = tensor.clone()  # modified below; the original's memory may be reused
        elif name.endswith(_DOWN):
            down = tensor.clone()
        elif name.endswith(_UP):
            path = name.removesuffix(_UP)
            pending[f"{path}{_BASE}weight"] += _product(model.get_submodule(path), down, tensor)
            yield from ((base_name(key), value) for key, value in pending.items())
            pending.clear()
        else:
            yield name, tensor


def _product(layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """Compute ``(alpha / rank) B A`` in float32, because CPUs are slow and imprecise in bfloat16."""
    product = (up.float() @ down.float()) * layer.scaling[_NAME]
    return (product.T if layer.fan_in_fan_out else product).to(up.dtype)


def merged_weights(lm: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return the merged weights of :func:`merged` by name; None for a model without adapters."""
    if not any(is_adapter(name) for name, _ in lm.named_parameters()):
        return None
    return dict(merged(lm, whole_tensors(lm)))


def frozen_names(module: nn.Module) -> set[str]:
    """Return the ``state_dict`` names of the parameters that are not trained."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def save_adapter(lora: LoRA | None, weights: dict[str, Tensor], directory: Path, base: str | None = None) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, the format of peft and vLLM.

    Args:
        lora: configuration of the adapters.
        weights: full adapter tensors by the names of ``named_parameters``.
        directory: output directory, created if missing; files of an earlier adapter are replaced.
        base: directory or hub id of the base model; None if unknown.
    """
    from safetensors.torch import save_file

    assert lora is not None
    targets = (_last_part(name.removesuffix(_UP)) for name in weights if name.endswith(_UP))
    config = lora.peft_config(targets, transposed=False)  # peft detects transposed weights itself when loading
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(directory)
    draft = directory / "adapter_model.safetensors.new"
    named = {peft_name(name): tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, draft, metadata={"format": "pt"})
    draft.replace(directory / "adapter_model.safetensors")  # atomic: readers of the old file are not affected


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

    Args:
        sources: model sources by role.
    """
    return {name: asdict(source.lora) for name, source in sources.items() if source.lora is not None}
