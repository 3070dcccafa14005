"""LoRA: small matrices beside the frozen ones of a model, which alone are trained. The layers themselves are peft's."""

from __future__ import annotations

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

from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.seeding import derive_seed, run_seed

_NAME = "default"  # peft's for a model's only adapter
_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
_BASE, _DOWN, _UP = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: an adapted layer computes ``W x + (alpha / rank) B A x``.

    See "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al. 2021, sec. 4.1. W is frozen; A (rank by inputs)
    is drawn from the run's seed, B (outputs by rank) begins as zeros, so that the model begins as its source. There
    is no dropout: a ratio of probabilities needs both sides from the same network.

    Args:
        rank: of the product, at least 1.
        alpha: the product is multiplied by alpha / rank; positive.
        target_modules: the last parts of the names of linear layers, for example ``[q_proj, v_proj]``; None adapts all
            linear layers of the blocks. Embedding and head are never adapted.

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
                raise ValueError(f"lora: {name} must be at least 1, got {value}")
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("lora: target_modules names no layer; leave it out to adapt all linear layers")
        if importlib.util.find_spec("peft") is None:
            raise ModuleNotFoundError("lora needs peft, which is not installed: pip install 'lightning-rlhf[peft]'")

    def add_to(self, lm: PreTrainedModel) -> None:
        """Freeze a model and put adapters, kept in float32, beside the linear layers of its backbone.

        Args:
            lm: with a head; a scalar model's, which nobody has trained yet, is trained whole.

        Raises:
            ValueError: a target is no linear layer of the backbone, or peft would adapt stacked experts with it.
        """
        from peft import inject_adapter_in_model

        layers = self.targets(lm)
        config = self.peft_config(layers, transposed=any(isinstance(layer, Conv1D) for layer in layers.values()))
        lm.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(run_seed(), "adapters", type(lm).__name__))
            inject_adapter_in_model(config, lm.base_model, _NAME)
        if any(f"{_BASE}lora_" in name for name, _ in lm.named_parameters()):
            raise ValueError(
                f"lora: with the layers that experts are made of among its targets, peft adapts the experts of "
                f"{type(lm).__name__} too, which are one tensor and are not merged here: set target_modules to some of "
                f"{', '.join(sorted(layers.keys() - _OF_EXPERTS))}"
            )
        for name, parameter in lm.named_parameters():
            if is_adapter(name):
                parameter.data = parameter.data.float()  # steps are too small for bfloat16
        head: Any = getattr(lm, "score", None)
        if head is not None:
            head.requires_grad_(True)

    def targets(self, lm: PreTrainedModel) -> dict[str, nn.Module]:
        """The last parts of the names of the layers to put adapters beside, and the last such layer of each.

        Args:
            lm: without adapters.

        Raises:
            ValueError: a target is no linear layer of the backbone, or there are none.
        """
        named = lm.base_model.named_modules()
        known = {_last(name): layer for name, layer in named if isinstance(layer, (nn.Linear, Conv1D))}
        if not known:
            raise ValueError(f"lora: {type(lm).__name__} has no linear layers to adapt; train it whole")
        if unknown := sorted(set(self.target_modules or ()) - known.keys()):
            raise ValueError(
                f"lora: {', '.join(unknown)} is no linear layer of {type(lm).__name__}'s blocks, which have "
                f"{', '.join(sorted(known))}"
            )
        return {name: known[name] for name in self.target_modules or known}

    def peft_config(self, targets: Iterable[str], transposed: bool) -> Any:
        """The same for peft.

        Args:
            targets: last parts of the names of adapted layers.
            transposed: whether these layers keep their weights as inputs x outputs, as GPT-2 does.
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


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter.

    Args:
        name: as ``named_parameters`` gives it.
    """
    return name.endswith((_DOWN, _UP))


def base_name(name: str) -> str:
    """The name of a parameter before adapters were added.

    Args:
        name: as ``named_parameters`` gives it.
    """
    return name.replace(_BASE, ".")


def peft_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files, for the whole model.

    Args:
        name: as ``named_parameters`` gives it.
    """
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let adapted layers compute ``W x``.

    peft's own switch also says that adapters need no gradient, which whoever spreads them over devices has to know
    from the start; so what it switches is set here. tests/models/test_lora.py says what changed if that is gone.

    Args:
        model: with adapters.

    Raises:
        ValueError: it has none, so that there is nothing to switch off.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters that could be switched off")
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapted_parts(layer: Any, outputs: bool) -> list[nn.Module]:
    """The linear layers that have to be split where a layer is: itself, or its own and one of its adapter's.

    Args:
        layer: with or without an adapter.
        outputs: whether its outputs are split, else its inputs are.
    """
    if not hasattr(layer, "base_layer"):
        return [layer]
    return [layer.base_layer, (layer.lora_B if outputs else layer.lora_A)[_NAME]]


@torch.no_grad()
def merged(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the model without adapters that computes the same: ``W + (alpha / rank) B A`` for each W.

    Added in float32 where the adapters are, and rounded to the dtype of W once, as peft's ``merge_and_unload`` does it.
    Nothing of the model changes, and no more than one layer's weight is held.

    Args:
        model: whose parameters they are, to look up what adapted layers multiply by; one without adapters gives its
            parameters as they are.
        parameters: (name, whole tensor) in the order of ``named_parameters``, each needed only until the next.

    Yields:
        (name without adapters, whole tensor), each valid only until the next.
    """
    held: dict[str, Tensor] = {}
    down = torch.empty(0)
    for name, tensor in parameters:
        if _BASE in name:
            held[name] = tensor.clone()  # is changed below, and the next one may lie where it lies
        elif name.endswith(_DOWN):
            down = tensor.clone()
        elif name.endswith(_UP):
            path = name.removesuffix(_UP)
            held[f"{path}{_BASE}weight"] += _product(model.get_submodule(path), down, tensor)
            yield from ((base_name(key), value) for key, value in held.items())
            held.clear()
        else:
            yield name, tensor


def _product(layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """What an adapter adds to its layer's weight; in float32, because CPUs are slow at less and imprecise."""
    product = (up.float() @ down.float()) * layer.scaling[_NAME]
    return (product.T if layer.fan_in_fan_out else product).to(up.dtype)


def own_weights(lm: PreTrainedModel) -> dict[str, Tensor] | None:
    """Adapted weights as :func:`merged` gives them; None for a model without adapters, whose own are as good."""
    if not any(is_adapter(name) for name, _ in lm.named_parameters()):
        return None
    return dict(merged(lm, whole_tensors(lm)))


def frozen_names(module: nn.Module) -> set[str]:
    """Names in ``state_dict`` of the parameters that are not trained."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def save_adapter(lora: LoRA | None, weights: dict[str, Tensor], directory: Path, base: str | None = None) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which peft and vLLM put onto the same base.

    Args:
        lora: what the adapters are.
        weights: of the adapters, whole, by the names of ``named_parameters``.
        directory: created if absent; files of an earlier adapter are replaced.
        base: directory or hub id of the model that they are for, if it has one.
    """
    from safetensors.torch import save_file

    assert lora is not None
    targets = (_last(name.removesuffix(_UP)) for name in weights if name.endswith(_UP))
    config = lora.peft_config(targets, transposed=False)  # peft sees for itself when it loads them
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(directory)
    draft = directory / "adapter_model.safetensors.new"
    named = {peft_name(name): tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, draft, metadata={"format": "pt"})
    draft.replace(directory / "adapter_model.safetensors")  # whoever still reads the old one keeps it


def check_same(sources: dict[str, Any], stored: dict[str, Any]) -> None:
    """Refuse adapters that a checkpoint does not have, or has in another way.

    Args:
        sources: of the roles, by name.
        stored: what :func:`described` gave when the checkpoint was written.

    Raises:
        ValueError: they differ, which the shapes of weights do not always show.
    """
    ours = described(sources)
    for name in sorted(ours.keys() | stored.keys()):
        if ours.get(name) != stored.get(name):
            raise ValueError(
                f"the checkpoint was written with lora {stored.get(name, 'null')} of the {name}, and this run has "
                f"{ours.get(name, 'null')}: configure what it was, or start a new run from the exported model"
            )


def described(sources: dict[str, Any]) -> dict[str, Any]:
    """The adapters of some roles in plain values, for a checkpoint.

    Args:
        sources: of the roles, by name.
    """
    return {name: asdict(source.lora) for name, source in sources.items() if source.lora is not None}
