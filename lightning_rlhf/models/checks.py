"""Checks of a model's files before its weights are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from lightning_rlhf.expected_errors import UsageError

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def check_sizes(config: PretrainedConfig, name: str) -> None:
    """Validate that the sizes of an architecture are positive, and that its list of classes is one.

    Args:
        config: configuration of the model.
        name: name of its source, for the message.

    Raises:
        ValueError: a size is below 1, or ``architectures`` is not a list.
    """
    if not isinstance(config.architectures, list | tuple | None):
        raise UsageError(f"{name} has architectures {config.architectures!r}, expected a list of class names")
    text_config: Any = config.get_text_config()
    for size in _SIZES:
        value = getattr(text_config, size, None)
        if isinstance(value, int) and value < 1:
            raise UsageError(f"{name} has {size} {value}, expected at least 1")


def check_weights(directory: Path) -> None:
    """Validate that a directory's weight index lists only existing safetensors files in that directory.

    Args:
        directory: directory of a model; a path without an index, such as a hub id, is not checked.

    Raises:
        ValueError: there are neither weights nor an index, or the index is damaged, or lists a file that is missing,
            elsewhere or of another format.
    """
    index = directory / _INDEX
    if not index.is_file():
        if directory.is_dir() and not (directory / _WEIGHTS).is_file():
            others = ", ".join(sorted(file.name for file in directory.glob("*.safetensors"))[:3])
            raise UsageError(
                f"{str(directory)!r} has neither model.safetensors nor {index.name}, which lists the files of weights; "
                f"it contains {others or 'no safetensors'}: copy the missing file"
            )
        return
    for file in sorted(set(_listed(index).values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UsageError(f"{index} names {file!r}: only *.safetensors files in the same directory are read")
        if not (directory / file).is_file():
            raise UsageError(f"{index} names {file!r}, which is missing")


def _listed(index: Path) -> dict[str, str]:
    """Return the file of each tensor in an index."""
    try:
        return {name: str(file) for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{index} is damaged: {type(error).__name__}: {error}") from None


def stored_file(path: str, name: str, revision: str | None = None) -> Path | None:
    """Return a file of a model, which is downloaded from the hub if the path is not a directory; None without it.

    Args:
        path: directory or hub id.
        name: name of the file.
        revision: branch, tag or commit of the hub repository.
    """
    file = cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)


def tensor_files(path: str, revision: str | None = None) -> dict[str, str]:
    """Return the name of the file of each tensor of a model, without reading the tensors.

    Args:
        path: directory or hub id.
        revision: branch, tag or commit of the hub repository.

    Raises:
        ValueError: a file is missing or damaged.
    """
    check_weights(Path(path))
    if (index := stored_file(path, _INDEX, revision)) is not None:
        return _listed(index)
    if (weights := stored_file(path, _WEIGHTS, revision)) is None:
        return {}
    return dict.fromkeys(tensor_names(weights), _WEIGHTS)


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a file.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise UsageError(f"{file} is damaged: {error}") from None


def tensors_left_out(directory: Path, model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the names of a checkpoint's tensors that are part of no parameter of a model, such as those of MTP heads.

    Args:
        directory: directory of the checkpoint; of another path, such as a hub id, the tensors that transformers ignores
            are not known.
        model: model of transformers that was loaded from it.
        unexpected: names that transformers reported.
    """
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    names = set(unexpected)
    loaded = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    loaded |= {name.removeprefix(f"{model.base_model_prefix}.") for name in loaded}  # as backbones are saved
    for path in directory.glob("*.safetensors") if ignored and directory.is_dir() else ():
        names |= {name for name in tensor_names(path) if any(pattern.search(name) for pattern in ignored)} - loaded
    return sorted(names)


def memory_error(error: RuntimeError, name: str) -> ValueError | None:
    """Return an error with the model's name if torch could not allocate memory, else None.

    Args:
        error: exception of torch.
        name: name of the model's source.
    """
    if "allocate" not in str(error):
        return None
    place = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "this machine"
    return UsageError(
        f"{name} needs more memory than {place} has: {str(error).splitlines()[0]}; lightning-rlhf plan, with the "
        f"options of this run, lists what needs the memory"
    )
