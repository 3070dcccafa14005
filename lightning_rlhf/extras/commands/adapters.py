"""Adapters merged into their base model, and adapters extracted from a model whose weights were all trained."""

from __future__ import annotations

import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.adapter_files import adapter_directory, is_head, save_adapter, tensor_shapes
from lightning_rlhf.models.classes import text_model_of
from lightning_rlhf.models.loading import Dtype, Pretrained, quiet_transformers
from lightning_rlhf.models.lora import NAME, LoRA

log = logging.getLogger(__name__)
_OF_TOKENIZERS = (
    "tokenizer*",
    "added_tokens.json",
    "*.model",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
)


def merge(base: str, adapter: str, to: Path) -> str:
    """Write a model with an adapter merged into its weights.

    Args:
        base: directory or hub id of the base model.
        adapter: directory or hub id of the adapter.
        to: output directory.

    Returns:
        A sentence about the result.

    Raises:
        ValueError: the adapter does not fit the model.
    """
    directory = adapter_directory(adapter)
    source = Pretrained(base, adapter=adapter, dtype=_stored_dtype(base))
    is_scalar = any(map(is_head, tensor_shapes(directory)))
    with quiet_transformers():
        model = source.scalar() if is_scalar else source.causal()
        model.save_pretrained(to)
    copied = _copy_tokenizer(to, directory, Path(base))
    return f"{to} has {base} with the adapter merged in {source.dtype}{copied}"


@torch.no_grad()
def extract(base: str, tuned: str, rank: int, to: Path) -> str:
    """Write the adapter that changes a base model most like a model that was trained from it.

    Of each linear layer of the backbone, the difference of the weights is replaced by the nearest matrix of the rank,
    by its largest singular values (Eckart and Young 1936); A and B get the square roots of these.

    Args:
        base: directory or hub id of the base model.
        tuned: directory or hub id of the trained model.
        rank: rank of the adapter, at least 1.
        to: output directory.

    Returns:
        A sentence about the result.

    Raises:
        ValueError: the models differ in their shapes, or are equal.
    """
    if find_spec("bitsandbytes") is not None:
        the_offered("quantization").bitsandbytes()  # before peft imports it, which warns that kernels are missing
    lora = LoRA(rank, alpha=rank)
    with quiet_transformers():
        before, after = (Pretrained(path, dtype="float32").causal().lm for path in (base, tuned))
    shapes = [{name: parameter.shape for name, parameter in lm.named_parameters()} for lm in (before, after)]
    if shapes[0] != shapes[1]:
        different = sorted({*shapes[0].items()} ^ {*shapes[1].items()}, key=str)[0][0]
        raise UsageError(
            f"{base} and {tuned} differ in the shape of {different}: extract from a model trained from the base"
        )
    weights: dict[str, Tensor] = {}
    whole = left = rest = 0.0
    prefix = next(name for name, module in after.named_modules() if module is text_model_of(after))
    linear = {
        f"{prefix}.{name}": layer
        for name, layer in text_model_of(after).named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }
    for name, parameter in after.named_parameters():
        change = parameter - before.get_parameter(name)
        size = float(change.square().sum())
        whole += size
        path = name.removesuffix(".weight")
        if path not in linear or name == path:
            rest += size
            continue
        down, up = _factors(change.T if isinstance(linear[path], Conv1D) else change, rank)
        left += max(0.0, size - float((up @ down).square().sum()))
        weights |= {f"{path}.lora_A.{NAME}.weight": down, f"{path}.lora_B.{NAME}.weight": up}
    if not whole:
        raise UsageError(f"{base} and {tuned} have the same weights: nothing to extract")
    save_adapter(lora, weights, to, base)
    copied = _copy_tokenizer(to, Path(tuned), Path(base))
    if rest:
        log.warning(
            "%.1f %% of the squared change is in embeddings, norms and biases, which an adapter does not have",
            100 * rest / whole,
        )
    share = 1 - (left + rest) / whole
    return f"{to} has an adapter of rank {rank} with {100 * share:.1f} % of the squared change of the weights{copied}"


def _factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A (rank by inputs) and B (outputs by rank) whose product is nearest to a change of a weight."""
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    roots = values[:rank].sqrt()
    missing = max(0, rank - len(values))
    down, up = roots.unsqueeze(1) * right[:rank], left[:, :rank] * roots
    return nn.functional.pad(down, (0, 0, 0, missing)), nn.functional.pad(up, (0, missing))


def _stored_dtype(path: str) -> Dtype:
    stored: Any = Pretrained(path).hf_config().dtype
    return "bfloat16" if stored == torch.bfloat16 else "float32"


def _copy_tokenizer(to: Path, *directories: Path) -> str:
    """Copy a tokenizer's files from the first directory that has them; return a part of a sentence."""
    for directory in directories:
        files = [file for pattern in _OF_TOKENIZERS for file in directory.glob(pattern)] if directory.is_dir() else []
        if any(file.name.startswith("tokenizer") for file in files):
            for file in files:
                if not (to / file.name).exists():
                    shutil.copy(file, to / file.name)
            return ""
    return "; copy the tokenizer to it, which no directory has"
