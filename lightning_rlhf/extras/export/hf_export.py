"""HFExport: writes the trained model as transformers loads it, with tokenizer, metrics and model card."""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lightning_rlhf.__about__ import __version__
from lightning_rlhf.callbacks.loop.checks import check_module
from lightning_rlhf.callbacks.records.run_reader import RunWriter
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.tokenizers import end_tokens_of
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.export import hub
from lightning_rlhf.extras.records.val_metrics import shown_names, with_interval
from lightning_rlhf.images import reader
from lightning_rlhf.models.loading import Pretrained, quiet_transformers
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.paths import names_a_path
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints.io import digest

log = logging.getLogger(__name__)
_CARD_METRICS = ("reward/mean", "kl/ref", "train/loss")  # metrics in a model card, besides those of the validation


class HFExport(RunWriter):
    """Writes the trained model and its tokenizer to ``export/`` when training ends, and every n steps if you want.

    You can load the directory with ``transformers`` or vLLM, or name it in the configuration of another run. It also
    contains the last metrics in ``metrics.json`` and a model card in ``README.md``. The command ``export`` writes the
    same from a checkpoint.

    Args:
        every_n_steps: steps between exports to ``export-<step>/``. 0 exports only at the end.
        adapter: whether to write only the LoRA adapters, which peft and vLLM add to the base model. False merges them
            into the weights.
        push_to: repository ``owner/name`` on the Hugging Face Hub to which the final export is uploaded as one commit.
            The run creates it before it trains, with the token of ``HF_TOKEN`` or ``hf auth login``. None: no upload.
        private: whether a repository that the run creates is private. The model card has the paths of model and data.
    """

    def __init__(
        self, every_n_steps: int = 0, adapter: bool = False, push_to: str | None = None, private: bool = True
    ) -> None:
        if every_n_steps < 0:
            raise UsageError(f"every_n_steps must be 0 (only at the end) or positive, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.adapter = adapter
        self.push_to = push_to
        self.private = private

    def setup(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Validate the module, that it has adapters if only they are exported, and that it may be uploaded."""
        check_module(self, pl_module, RoleModule)
        if (repository := self.push_to) is not None and stage == "fit" and not trainer.fast_dev_run:
            ranks.on_first_rank(lambda: hub.create(repository, self.private))
        if self.adapter:
            check_adapter(pl_module, pl_module.trained_roles[0], "HFExport(adapter=True)")

    def on_train_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Rename the export of an earlier part of this run to ``export-<step>``, so that it is not replaced."""
        target = Path(trainer.default_root_dir) / "export"
        has_steps = trainer.max_steps <= 0 or trainer.global_step < trainer.max_steps
        if not (trainer.is_global_zero and has_steps and (target / "metrics.json").is_file()) or trainer.fast_dev_run:
            return
        step = json.loads((target / "metrics.json").read_text())["step"]
        older = target.with_name(f"export-{step}")
        shutil.rmtree(older, ignore_errors=True)
        target.rename(older)
        log.info("%s is from step %d; it was renamed to %s.", target, step, older)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Export the model every ``every_n_steps`` steps."""
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0 and not trainer.fast_dev_run:
            self._write(trainer, pl_module, f"export-{trainer.global_step}")

    def on_fit_end(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Export the final model."""
        if not trainer.fast_dev_run:
            self._write(trainer, pl_module, "export")
            if self.push_to is not None and trainer.is_global_zero:
                directory = Path(trainer.default_root_dir) / "export"
                hub.upload(directory, self.push_to, f"lightning-rlhf: step {trainer.global_step}")

    def _write(self, trainer: Trainer, module: RoleModule, name: str) -> None:
        target = Path(trainer.default_root_dir) / name
        draft = target.with_name(name + ".new")
        if trainer.is_global_zero:
            shutil.rmtree(draft, ignore_errors=True)
        with quiet_transformers():
            module.export(draft, trainer.is_global_zero, self.adapter)
        if not trainer.is_global_zero:
            return
        origin = Origin(
            module=module,
            role=module.trained_roles[0],
            data=trainer.datamodule,
            config=target.parent / "config.yaml",
            step=trainer.global_step,
            metrics={key: float(value) for key, value in trainer.callback_metrics.items()},
        )
        complete_export(draft, origin, trainer.datamodule.tokenizer)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)


@dataclass(frozen=True)
class Origin:
    """Origin of an exported model.

    Args:
        module: module that trained it.
        data: data module of the run.
        config: path of the run's configuration; the file may be absent.
        step: number of training steps.
        metrics: last metrics of the run.
    """

    module: RoleModule
    role: str
    data: RowsDataModule
    config: Path
    step: int
    metrics: Mapping[str, float]


def check_adapter(module: RoleModule, role: str, option: str) -> None:
    """Validate that a role can be exported as adapters alone.

    Args:
        role: role to export.
        option: option that requests adapters, for the message.

    Raises:
        ValueError: the role has no adapters.
    """
    if module.sources[role].lora is None:
        raise UsageError(
            f"{option} exports only LoRA adapters, but this run exports its {role}, which has no adapters: remove the "
            f"option"
        )


def complete_export(directory: Path, origin: Origin, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write tokenizer, metrics and model card next to exported weights, and update the generation configuration.

    Args:
        directory: directory with the weights.
        tokenizer: tokenizer of the run, with its chat template.
    """
    scores = origin.role != "actor" and (directory / "config.json").is_file()
    saved = _with_padding_of_its_own(tokenizer, directory) if scores else tokenizer
    saved.save_pretrained(directory)
    source = origin.module.sources[origin.role]
    if getattr(source.hf_config(), "vision_config", None) is not None:
        path = source.path if isinstance(source, Pretrained) else origin.data.tokenizer_source
        if isinstance(path, str):
            reader().copy_processor(path, directory)
    if (directory / "generation_config.json").is_file():
        _add_end_tokens(directory, end_tokens_of(tokenizer, origin.data.tokenizer_source))
    # JSON has no NaN, which a metric without values is; the step is not that of a user's metric with this name.
    finite = {name: value if math.isfinite(value) else None for name, value in origin.metrics.items()}
    metrics = {**finite, "step": origin.step}
    (directory / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    adapter_only = (directory / "adapter_config.json").is_file()
    (directory / "README.md").write_text(model_card(origin, adapter_only), encoding="utf-8")
    for weights in directory.glob("*.safetensors"):  # safetensors creates files that only their owner can read
        shutil.copymode(directory / "README.md", weights)


def _with_padding_of_its_own(tokenizer: PreTrainedTokenizerBase, directory: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose padding token no text ends with, and write its id to the model's configuration.

    transformers reads a score at the last token that is not padding, which would be a token too early where padding is
    the end token. Without another special token, neither has a padding token: transformers then raises for a batch.
    """
    end = tokenizer.eos_token_id
    if tokenizer.pad_token_id in (None, end):
        known = (tokenizer.bos_token, tokenizer.unk_token, *tokenizer.all_special_tokens)
        others = [token for token in known if token and tokenizer.convert_tokens_to_ids(token) != end]
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = next(iter(others), None)
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in (config, *([config["text_config"]] if "text_config" in config else ())):
        part["pad_token_id"] = tokenizer.pad_token_id
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def _add_end_tokens(directory: Path, trained: Sequence[int]) -> None:
    """Add the tokens that ended responses in training to the generation configuration."""
    config = GenerationConfig.from_pretrained(directory)
    ends = config.eos_token_id
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    if missing := [end for end in trained if end not in ends]:
        config.eos_token_id = [*missing, *ends]
        config.save_pretrained(directory)


def model_card(origin: Origin, adapter_only: bool) -> str:
    """Return the model card, in Markdown with the hub's header.

    Args:
        adapter_only: whether only LoRA adapters are exported.
    """
    source = origin.module.sources[origin.role]
    algorithm = type(origin.module).__name__.removesuffix("Module")
    header = {
        "library_name": "peft" if adapter_only else "transformers",
        "pipeline_tag": "text-generation" if origin.role == "actor" else "text-classification",
        "tags": ["lightning-rlhf", algorithm.lower()],
    }
    base = f"random weights, {source.hf_config().model_type}"
    if isinstance(source, Pretrained):
        base = source.path + (f", revision {source.revision}" if source.revision else "")
        if not names_a_path(source.path):
            header["base_model"] = source.path
    data = origin.data.sources["train"]
    versions = {"lightning-rlhf": __version__}
    versions |= {package: metadata.version(package) for package in ("lightning", "torch", "transformers")}
    facts = {
        "base model": base,
        "algorithm": f"{algorithm}, its {origin.role}, after {origin.step} steps",
        "data": data if isinstance(data, str) else repr(data),
        "configuration": f"SHA-256 {digest(origin.config)}" if origin.config.is_file() else "from Python",
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items()),
    }
    if source.lora is not None:
        export = "merged into the weights"
        if adapter_only:
            export = "alone, to be added to the base model"
        facts["LoRA"] = f"rank {source.lora.rank}, alpha {source.lora.alpha}, {export}"
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]
    lines += [f"# A model trained by {algorithm}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(str(value))} |" for name, value in facts.items()]
    if origin.role == "actor":
        form = (
            "The model was trained only on prompts in the form of the data. Prompts in another form, for example "
            "without examples that the data's prompts have, were not part of the training."
        )
        lines += ["", form]
    names = [*shown_names(origin.metrics), *(name for name in _CARD_METRICS if name in origin.metrics)]
    if names:
        lines += ["", "Last metrics of the run, 95 % intervals in brackets; `metrics.json` has all:", ""]
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| `{_cell(name)}` | {with_interval(name, origin.metrics)} |" for name in names]
    return "\n".join([*lines, "", "Written by lightning-rlhf.", ""])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
