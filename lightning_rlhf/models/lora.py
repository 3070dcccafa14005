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

from lightning_rlhf.seeding import derive_seed, run_seed

_NAME = "default"  # peft's for a model's only adapter
_BASE, _DOWN, _UP = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: an adapted layer computes ``W x + (alpha / rank) B A x`` ("LoRA", Hu et al. 2021, section 4.1).

    W is frozen; A (rank x inputs) is drawn from the run's seed, B (outputs x rank) begins as zeros, so that the model
    begins as its source. There is no dropout: a ratio of probabilities needs both sides from the same network.

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
            ValueError: a target is no linear layer of the backbone.
        """
        from peft import inject_adapter_in_model

        config = self.peft_config(lm)
        lm.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(run_seed(), "adapters", type(lm).__name__))
            inject_adapter_in_model(config, lm.base_model, _NAME)
        for name, parameter in lm.named_parameters():
            if is_adapter(name):
                parameter.data = parameter.data.float()  # steps are too small for bfloat16
        head: Any = getattr(lm, "score", None)
        if head is not None:
            head.requires_grad_(True)

    def peft_config(self, lm: PreTrainedModel) -> Any:
        """The same for peft, whose layers begin with zeros times numbers drawn from torch's generator.

        Args:
            lm: with or without adapters.
        """
        from peft import LoraConfig

        layers = {name.removesuffix(_BASE[:-1]): module for name, module in _linear_layers(lm.base_model)}
        wanted = set(self.target_modules or {name.rpartition(".")[2] for name in layers})
        known = {name.rpartition(".")[2] for name in layers}
        if unknown := sorted(wanted - known):
            raise ValueError(
                f"lora: {', '.join(unknown)} is no linear layer of {type(lm).__name__}'s blocks, which has "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        if not known:
            raise ValueError(f"lora: {type(lm).__name__} has no linear layers to adapt; train it whole")
        chosen = [module for name, module in layers.items() if name.rpartition(".")[2] in wanted]
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=sorted(wanted),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            fan_in_fan_out=isinstance(chosen[0], Conv1D),
        )


def _linear_layers(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in backbone.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and not is_adapter(f".{name}.weight"):
            yield name, module


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
    return dict(merged(lm, ((name, parameter.detach()) for name, parameter in lm.named_parameters())))


def frozen_names(module: nn.Module) -> set[str]:
    """Names in ``state_dict`` of the parameters that are not trained."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def save_adapter(lora: LoRA | None, lm: PreTrainedModel, weights: dict[str, Tensor], directory: str | Path) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which peft and vLLM put onto the same base.

    Args:
        lora: the adapters.
        lm: that has them.
        weights: of the adapters, whole, by the names of ``named_parameters``.
        directory: created if absent.
    """
    from safetensors.torch import save_file

    assert lora is not None
    config = lora.peft_config(lm)
    config.base_model_name_or_path = lm.name_or_path or None
    config.inference_mode = True
    config.save_pretrained(directory)
    files = {peft_name(name): tensor.contiguous() for name, tensor in weights.items()}
    save_file(files, Path(directory) / "adapter_model.safetensors", metadata={"format": "pt"})


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
