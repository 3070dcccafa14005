"""Missing files, and settings that do not belong together, found before libraries are imported.

The same functions find them in every run. Functions of users are not called here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.cli.config_files import read_text
from lightning_rlhf.cli.earlier_run import DIRECTORY, check_permission, found_checkpoint
from lightning_rlhf.data.columns import PROMPT, REWARD_FIELDS, Columns
from lightning_rlhf.data.files import Files, is_url
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import as_rows
from lightning_rlhf.expected_errors import ExpectedError, MissingPackageError, UsageError
from lightning_rlhf.extras.schema.known import definition, schema
from lightning_rlhf.extras.schema.used import Used, classes_in
from lightning_rlhf.models.directory import expect_adapter_directory, expect_model_directory
from lightning_rlhf.rewards.function import ENVIRONMENT
from lightning_rlhf.run_checks import (
    check_batch_size,
    check_group_size,
    check_loops,
    check_minibatch_size,
    check_quantization,
    check_val_metric,
)
from lightning_rlhf.strategies.names import REGISTERED, unknown_strategy

_LOOP = "lightning_rlhf.callbacks.loop.rollout_loop.RolloutLoop"
_MODULE = "lightning_rlhf.modules.rlhf.RLHFModule"
_PROMPTS = "lightning_rlhf.data.prompts.PromptDataModule"
_PRETRAINED = "lightning_rlhf.models.loading.Pretrained"


@dataclass(frozen=True)
class _Run:
    """The parts of a configuration that the checks compare.

    Args:
        command: command that runs it.
        ckpt_path: its checkpoint, or anything else.
        trainer: arguments of the Trainer.
        module: its module; without a definition if it is unknown.
        data: its data module.
        callbacks: its callbacks; None if they are in a file.
    """

    command: str
    ckpt_path: Any
    trainer: dict[str, Any]
    module: Used
    data: Used
    callbacks: list[Used] | None

    @property
    def loops(self) -> list[Used]:
        """Callbacks that are known to be a RolloutLoop."""
        return [callback for callback in self.callbacks or () if callback.is_a(_LOOP)]

    def first_rows(self, count: int) -> list[tuple[str, Row]]:
        """Return the first rows of a PromptDataModule with their locations; none if they are not in local texts."""
        source = self.data.arguments.get("train")
        if not self.data.is_a(_PROMPTS) or not isinstance(source, str) or is_url(source):
            return []
        files = as_rows(source)
        if not isinstance(files, Files) or any(path.endswith(".parquet") for path in files.paths):
            return []
        return list(itertools.islice((each for each in files.rows() if not isinstance(each[1], BadRow)), count))


def mistakes_of_inputs(config: dict[str, Any], command: str) -> Iterator[str]:
    """Yield a message for each mistake in the files of a run, and in settings that belong together.

    Args:
        config: content of the configuration files and options of a run.
        command: command that runs it; only ``fit`` needs a whole batch of training rows.
    """
    checks = (_check_paths, _check_strategy, _check_models, _check_data)
    yield from _messages(_run_of(config, command), *checks, _check_loops, _check_val_metric, _check_sizes)


def mistakes_of_settings(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each mistake in settings of a run that belong together, such as sizes of batches."""
    yield from _messages(_run_of(config, "fit"), _check_loops, _check_val_metric, _check_sizes)


def _run_of(config: dict[str, Any], command: str) -> _Run:
    """Return the parts of a configuration that the checks compare."""
    parts = {
        section: next(classes_in(config.get(section), section, schema()["properties"][section]), None)
        for section in ("model", "data")
    }
    module, data = (parts[section] or Used(section, "", None, {}) for section in parts)
    trainer = config.get("trainer", {})
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else trainer
    entries = callbacks if isinstance(callbacks, list) else [callbacks] if isinstance(callbacks, dict) else []
    used = [next(classes_in([entry], "trainer.callbacks", None), None) for entry in entries]
    return _Run(
        command=command,
        ckpt_path=config.get("ckpt_path"),
        trainer=trainer if isinstance(trainer, dict) else {},
        module=module,
        data=data,
        callbacks=None if isinstance(callbacks, str) else [each for each in used if each is not None],
    )


def _messages(run: _Run, *checks: Callable[[_Run], None]) -> Iterator[str]:
    """Yield the messages of the checks that fail."""
    for check in checks:
        try:
            check(run)
        except ExpectedError as error:
            yield str(error)


def _check_paths(run: _Run) -> None:
    path, directory = run.ckpt_path, run.trainer.get("default_root_dir")
    if isinstance(path, str) and (Path(path).expanduser() / "checkpoints").is_dir():
        raise UsageError(f"{path} is the directory of a run: set --ckpt_path to last, or to a path in its checkpoints/")
    if isinstance(path, str):
        found_checkpoint(path, Path(directory if isinstance(directory, str) else DIRECTORY))
    if isinstance(directory, str) and "://" not in directory:
        check_permission(Path(directory), renames=False)


def _check_strategy(run: _Run) -> None:
    name = run.trainer.get("strategy")
    if isinstance(name, str) and name.startswith("rlhf_") and name not in REGISTERED:
        raise UsageError(unknown_strategy(name, name, list(REGISTERED)))


def _check_models(run: _Run) -> None:
    for name, value in run.module.arguments.items():
        option = run.module.options.get(name)
        source = next(classes_in(value, "model", option), None)
        if source is not None and source.is_a(_PRETRAINED):
            value = source.arguments.get("path")
            _check_frozen_weights(name, source.arguments)
        # A name without a slash can be that of a role.
        if _PRETRAINED in str(option) and isinstance(value, str) and "/" in value:
            expect_model_directory(str(Path(value).expanduser()) if value.startswith("~") else value)


def _check_frozen_weights(role: str, options: Mapping[str, Any]) -> None:
    """Raise for an adapter that does not exist, and for quantized weights that would be trained or cannot be made."""
    adapter, quantization = options.get("adapter"), options.get("quantization")
    if isinstance(adapter, str):
        expect_adapter_directory(str(Path(adapter).expanduser()) if adapter.startswith("~") else adapter)
    if quantization is None:
        return
    if role in ("actor", "critic"):
        check_quantization(role, quantization, has_adapters=bool(options.get("lora")) or adapter is not None)
    if find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            "quantization needs bitsandbytes, which is not installed: pip install 'lightning-rlhf[quantization]'"
        )


def _check_data(run: _Run) -> None:
    for name in ("train", "val"):
        parts = run.data.arguments.get(name)
        for part in parts if isinstance(parts, list) else [parts]:
            if run.data.entry is not None and isinstance(part, str) and not is_url(part):
                as_rows(part)
    size = _size(run.data, "batch_size") or 1
    rows = run.first_rows(size)
    if not rows:
        return
    if run.command == "fit" and not run.data.arguments.get("sampler"):  # a sampler may repeat rows
        check_batch_size(size, len(rows))
    mapping = run.data.arguments.get("columns")
    mapping = mapping if isinstance(mapping, dict) else {}
    texts = {name: column for name, column in mapping.items() if isinstance(column, str)}
    fields = Columns(texts, (PROMPT, (("chosen", "chosen"),), *REWARD_FIELDS)).find(rows[0][1])
    if not {"prompt", "messages", "chosen"} & fields.names.keys() and run.data.arguments.get("on_bad_row") != "skip":
        try:
            fields["prompt"]
        except BadRow as error:
            raise UsageError(f"train data: {rows[0][0]}: {error}") from error


def _check_loops(run: _Run) -> None:
    if run.module.entry is not None and run.module.is_a(_MODULE) and run.callbacks is not None:
        others = [each for each in run.callbacks if each.entry is None and not each.path.startswith("lightning")]
        check_loops(run.module.entry["title"], len(run.loops), bool(run.loops) or bool(others))


def _check_val_metric(run: _Run) -> None:
    for loop in run.loops:
        rewards, metric = loop.arguments.get("rewards") or [], loop.arguments.get("val_metric")
        is_known = isinstance(rewards, list) and all(isinstance(each, dict) for each in rewards)
        if isinstance(metric, str) and is_known and not any("class_path" in each for each in rewards):
            labels = [
                each.get("name") or str(each.get("function")).replace(":", ".").split(".")[-1] for each in rewards
            ]
            check_val_metric(metric, labels + ([ENVIRONMENT] if loop.arguments.get("environment") else []))


def _check_sizes(run: _Run) -> None:
    if len(run.loops) != 1 or run.module.entry is None or run.data.entry is None:
        return
    (loop,) = run.loops
    if any(part.unknown for part in (loop, run.module, run.data)):
        return  # a misspelt name may be that of a size
    group_size, prompts = _size(loop, "group_size"), _size(run.data, "batch_size")
    minibatch = _size(run.module, "minibatch_size")
    estimator = _estimator(run.module)
    if estimator is not None and "x-needs-groups" in estimator and group_size is not None:
        check_group_size(estimator["title"], group_size)
    if group_size and prompts and minibatch and "dynamic_sampling" not in loop.arguments:
        check_minibatch_size(prompts, group_size, minibatch)


def _estimator(module: Used) -> dict[str, Any] | None:
    """Return the definition of the class of the estimator of advantages; None if it is unknown."""
    option = module.options.get("advantages", {})
    if "advantages" not in module.arguments:
        return definition(option.get("x-default", ""))
    used = next(classes_in(module.arguments["advantages"], "model.advantages", option), None)
    return None if used is None else used.entry


def _size(used: Used, name: str) -> int | None:
    """Return a number among the arguments of a class, or its default; None if it is unknown."""
    value = used.arguments.get(name, used.options.get(name, {}).get("default"))
    if isinstance(value, str):  # of the command line
        try:
            value = read_text(value)
        except yaml.YAMLError:
            return None
    return value if isinstance(value, int) and value > 0 else None
