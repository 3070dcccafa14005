"""Files of an exported model in addition to its weights: tokenizer, generation settings, metrics, model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.strategies.checkpoints.io import digest

_VERSIONS = ("lightning-rlhf", "lightning", "torch", "transformers")


@dataclass(frozen=True)
class Origin:
    """Where an exported model comes from.

    Args:
        module: module that trained it.
        role: role of the model.
        data: data module of the run.
        config: the run's configuration; may be absent.
        step: training steps behind it.
        metrics: the last ones.
    """

    module: RoleModule
    role: str
    data: RowsDataModule
    config: Path
    step: int
    metrics: Mapping[str, float]


def check_adapter(module: RoleModule, role: str, who: str) -> None:
    """Raise if adapters alone cannot be exported: there are none, or other weights were trained too.

    Args:
        module: module of the run.
        role: role to export.
        who: wants adapters, for the message.

    Raises:
        ValueError: there is none, or a head beside it.
    """
    if role != "actor" or module.sources[role].lora is None:
        reason = "whose head is trained too" if role != "actor" else "which has none"
        raise ValueError(
            f"{who} writes LoRA adapters by themselves, and this run exports its {role}, {reason}: leave adapter out"
        )


def complete_export(directory: Path, origin: Origin, tokenizer: PreTrainedTokenizerBase) -> None:
    """Put beside a model's weights what else an export holds.

    Args:
        directory: directory with the weights.
        origin: run that trained the model.
        tokenizer: tokenizer of the run, with its chat template.
    """
    tokenizer.save_pretrained(directory)
    if (directory / "generation_config.json").is_file():
        _end_where_trained_to(directory, tokenizer)
    metrics = {"step": origin.step, **origin.metrics}
    (directory / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    alone = (directory / "adapter_config.json").is_file()
    (directory / "README.md").write_text(card(origin, alone), encoding="utf-8")
    for weights in directory.glob("*.safetensors"):  # safetensors gives its files to their owner alone
        shutil.copymode(directory / "README.md", weights)


def _end_where_trained_to(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Return a configuration with the tokenizer's end token, which ended responses in training."""
    config = GenerationConfig.from_pretrained(directory)
    ends = config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id not in ends:
        config.eos_token_id = [tokenizer.eos_token_id, *ends]
        config.save_pretrained(directory)


def card(origin: Origin, alone: bool) -> str:
    """Return the model card, in Markdown with the hub's header.

    Args:
        origin: run that trained the model.
        alone: whether it is LoRA adapters by themselves.
    """
    module, source = origin.module, origin.module.sources[origin.role]
    algorithm = type(module).__name__.removesuffix("Module")
    causal = origin.role == "actor"
    header = {
        "library_name": "peft" if alone else "transformers",
        "pipeline_tag": "text-generation" if causal else "text-classification",
        "tags": ["lightning-rlhf", algorithm.lower()],
    }
    base = f"fresh weights, {source.hf_config().model_type}"
    if isinstance(source, Pretrained):
        base = source.path + (f", revision {source.revision}" if source.revision else "")
        if not Path(source.path).exists():  # a hub id, which the hub links to
            header["base_model"] = source.path
    facts = {
        "base model": base,
        "algorithm": f"{algorithm}, its {origin.role}, after {origin.step} steps",
        "data": _named(origin.data.sources["train"]),
        "configuration": f"SHA-256 {digest(origin.config)}" if origin.config.is_file() else "from Python",
        "versions": ", ".join(f"{name} {_version(name)}" for name in _VERSIONS),
    }
    if source.lora is not None:
        where = "alone, to be applied to the base model" if alone else "merged into the weights"
        facts["LoRA"] = f"rank {source.lora.rank}, alpha {source.lora.alpha}, {where}"
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]
    lines += [f"# A model trained by {algorithm}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    if origin.metrics:
        lines += ["", "Last metrics of the run:", "", "| metric | value |", "|---|---|"]
        lines += [f"| `{_cell(name)}` | {value:.6g} |" for name, value in sorted(origin.metrics.items())]
    return "\n".join([*lines, "", "Written by lightning-rlhf.", ""])


def _named(source: Any) -> str:
    return source if isinstance(source, str) else repr(source)


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        from lightning_rlhf.__about__ import __version__

        return __version__ if package == "lightning-rlhf" else "unknown"
