"""Adapters as files in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.models.directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS, expect_adapter_directory
from lightning_rlhf.models.lora import MAGNITUDE, NAME, UP, LoRA, is_adapter
from lightning_rlhf.paths import READ_ERRORS, expect_hub, hub_error_message

log = logging.getLogger(__name__)
HEAD = "score.weight"  # of a scalar model, which is trained beside its adapters; the only layer or one of two
_PREFIX = "base_model.model."
# Settings of peft without influence on the layers, or that the weights' names determine.
_WITHOUT_INFLUENCE = {
    "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights


def save_adapter(
    lora: LoRA | None,
    weights: dict[str, Tensor],
    directory: Path,
    base: str | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write an adapter, which peft and vLLM load.

    Args:
        lora: configuration of the adapters.
        weights: full adapter tensors by the names of ``named_parameters``, and the head of a scalar model.
        directory: output directory, created if missing; files of an earlier adapter are replaced.
        base: directory or hub id of the base model; None if unknown.
        metadata: texts to store with the weights.
    """
    assert lora is not None
    names = [name.removesuffix(UP) for name in weights if name.endswith(UP)]
    by_layer = any("." in target for target in lora.target_modules or ())
    targets = [_from_layers(name) if by_layer else name.rpartition(".")[2] for name in names]
    config = lora.peft_config(targets, transposed=False)  # peft detects transposed weights itself when loading
    config.base_model_name_or_path, config.inference_mode = base, True
    config.exclude_modules = set(lora.exclude_modules or ()) or None
    if any(map(is_head, weights)):
        config.task_type, config.modules_to_save = "SEQ_CLS", [HEAD.partition(".")[0]]
    config.save_pretrained(directory)
    draft = directory / f"{ADAPTER_WEIGHTS}.new"
    named = {peft_name(name): tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, draft, metadata={"format": "pt", **(metadata or {})})
    draft.replace(directory / ADAPTER_WEIGHTS)  # atomic: readers of the old file are not affected


def is_head(name: str) -> bool:
    """Return whether a parameter, or a tensor in a file of an adapter, belongs to the head of a scalar model."""
    return name.removeprefix(_PREFIX).startswith("score.")


def peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files.

    Args:
        name: parameter name as in ``named_parameters``.
    """
    if name.endswith(MAGNITUDE):
        name = name.removesuffix(".weight")
    return f"{_PREFIX}{name}.".replace(f".{NAME}.", ".").removesuffix(".")


def adapter_directory(path: str, revision: str | None = None) -> Path:
    """Return the directory with an adapter's two files; those of a hub repository are downloaded.

    Args:
        path: directory or hub id.
        revision: branch, tag or commit of the hub repository.

    Raises:
        FileNotFoundError: the directory, the repository or one of the two files does not exist.
    """
    expect_adapter_directory(path)
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import hf_hub_download

    try:
        expect_hub(path, revision)
        files = [hf_hub_download(path, name, revision=revision) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    except (ConnectionError, *READ_ERRORS) as error:
        raise MissingFileError(f"no adapter at {path!r}: {hub_error_message(path, error)}") from None
    return Path(files[0]).parent


def read_lora(directory: Path) -> LoRA:
    """Return the settings of an adapter, without reading its weights.

    Args:
        directory: result of :func:`adapter_directory`.

    Raises:
        ValueError: a file is damaged, or the adapter is of a kind that this package does not train.
    """
    file = directory / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), int(config["lora_alpha"])
        kind = config["peft_type"]
        same_alpha = alpha == config["lora_alpha"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if kind != "LORA" or not same_alpha:
        setting = f"peft_type {kind}" if kind != "LORA" else f"lora_alpha {config['lora_alpha']}"
        raise UsageError(
            f"the adapter {str(directory)!r} has {setting}: only LoRA with a whole lora_alpha is supported"
        )
    names = tensor_shapes(directory)
    if other := _other_settings(config, names):
        raise UsageError(
            f"the adapter {str(directory)!r} was trained with {', '.join(other)}, which is not supported: merge it "
            f"into its base model with peft, and start from that model"
        )
    if dropout := config.get("lora_dropout"):
        _note_dropout(str(directory), float(dropout))
    adapted = [name.removesuffix(".lora_B.weight") for name in names if ".lora_B." in name]
    excluded = []
    if _names_single_layers(config):
        targets = sorted(map(_from_layers, adapted))
    else:
        targets = sorted({name.rpartition(".")[2] for name in adapted})
        # Others name layers that have no adapter anyway, such as lm_head, or that the model does not have.
        excluded = [name for name in config.get("exclude_modules") or () if name in targets]
    return LoRA(
        rank,
        alpha,
        targets,
        exclude_modules=sorted(excluded) or None,
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
    )


@functools.cache  # a source is made again for every role
def _note_dropout(adapter: str, dropout: float) -> None:
    log.info(
        "The adapter %s was trained with lora_dropout %g, which is not used. SFT, preferences and reward models use it "
        "with lora: beside adapter: of the same settings and this dropout.", adapter, dropout,
    )  # fmt: skip


def _names_single_layers(config: dict[str, Any]) -> bool:
    """Return whether an adapter's settings select layers by more than the last part of their names."""
    if config.get("layers_to_transform") is not None:
        return True
    for option in ("target_modules", "exclude_modules"):
        names = config.get(option) or ()
        if names != "all-linear" and (isinstance(names, str) or any("." in name for name in names)):
            return True
    return False


def _from_layers(name: str) -> str:
    """Return the end of a layer's name from the list of decoder layers on, such as ``layers.0.mlp.up_proj``."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[number - 1 :])


def _other_settings(config: dict[str, Any], names: dict[str, Any]) -> list[str]:
    """Return settings of an adapter that change its layers in ways that :class:`LoRA` cannot represent."""
    other = {key for key, value in config.items() if value and key not in _WITHOUT_INFLUENCE}
    if str(config.get("init_lora_weights")).startswith(_CHANGE_THE_BASE):
        other.add(f"init_lora_weights {config['init_lora_weights']}")
    known = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
    other |= {name.removeprefix(_PREFIX) for name in names if not (name.endswith(known) or is_head(name))}
    return sorted(other)[:3]


def tensor_shapes(directory: Path) -> dict[str, torch.Size]:
    """Return the shapes of an adapter's tensors by their names in the file.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with safe_open(directory / ADAPTER_WEIGHTS, "pt") as file:
            return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UsageError(f"{directory / ADAPTER_WEIGHTS} is damaged: {error}") from None


def check_fits(lm: nn.Module, directory: Path, base: str) -> None:
    """Validate that an adapter belongs to a model; a model on the meta device suffices.

    Args:
        lm: model with adapters of the same settings.
        directory: directory of the adapter.
        base: name of the model's source, for the message.

    Raises:
        ValueError: names or shapes of tensors differ.
    """
    file = tensor_shapes(directory)
    ours = {peft_name(name): parameter.shape for name, parameter in lm.named_parameters() if is_adapter(name)}
    theirs = {name: shape for name, shape in file.items() if not is_head(name)}
    different = sorted(ours.keys() ^ theirs.keys()) or [name for name in ours if ours[name] != theirs[name]]
    if not different:
        return
    name = different[0]
    has = f"is {_described(theirs.get(name))} in the adapter and {_described(ours.get(name))} in the model"
    trained = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise UsageError(
        f"the adapter {str(directory)!r} does not fit the model {base!r}: {name.removeprefix(_PREFIX)} {has}; its "
        f"base model is {trained or 'not recorded'}"
    )


def _described(shape: torch.Size | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


@torch.no_grad()
def load_adapter(lm: nn.Module, directory: Path) -> dict[str, str]:
    """Copy the weights of an adapter, and of a scalar model's head if it has one, into a model.

    Args:
        lm: model with adapters of the same settings.
        directory: directory of the adapter.

    Returns:
        The texts that are stored with the weights.
    """
    stored = load_file(directory / ADAPTER_WEIGHTS)
    for name, parameter in lm.named_parameters():
        key = peft_name(name)
        if is_adapter(name) or (is_head(name) and key in stored):
            parameter.copy_(stored[key])
    with safe_open(directory / ADAPTER_WEIGHTS, "pt") as file:
        return dict(file.metadata() or {})
