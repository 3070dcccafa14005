"""Mistakes in files and in settings that belong together, found without importing torch.

The same functions find them in every run; here they are called before the libraries are imported, which takes seconds.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.cli.earlier_run import check_permission
from lightning_rlhf.cli.source_classes import SourceClass
from lightning_rlhf.cli.used_classes import UsedClass, classes_in, entries_of, of_kind
from lightning_rlhf.data.columns import PROMPT, REWARD_FIELDS, Columns
from lightning_rlhf.data.files import Files, is_url
from lightning_rlhf.data.image_parts import may_have_images
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import as_rows
from lightning_rlhf.expected_errors import ExpectedError, MissingFileError, MissingPackageError, UsageError
from lightning_rlhf.launch_environment import Machine
from lightning_rlhf.models.directory import expect_adapter_directory, expect_model_directory
from lightning_rlhf.rewards.function import CONVERSATION_COLUMNS, ENVIRONMENT, RewardFunction, check_rewards
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
_SOURCES = "lightning_rlhf.models.loading"
_PACKAGES_OF_LOGGERS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "TrackioLogger": "trackio"}


@dataclass(frozen=True)
class _Run:
    """The parts of a configuration that the checks compare.

    Args:
        config: content of the configuration files and options of a run.
        command: command that runs it.
        module: its module; None if the configuration has none.
        data: its data module; None if the configuration has none.
        callbacks: its callbacks.
    """

    config: dict[str, Any]
    command: str
    module: UsedClass | None
    data: UsedClass | None
    callbacks: list[UsedClass]

    @property
    def trainer(self) -> dict[str, Any]:
        """Arguments of the Trainer."""
        trainer = self.config.get("trainer")
        if isinstance(trainer, dict):
            return trainer
        return {}

    @property
    def loops(self) -> list[UsedClass]:
        """Callbacks that are a RolloutLoop."""
        return [
            callback for callback in self.callbacks if callback.kind is not None and callback.kind.is_subclass(_LOOP)
        ]

    def rows(self, name: str = "train") -> Iterator[tuple[str, Row]] | None:
        """Return the rows of a PromptDataModule with their locations; None if they are not in local files of text.

        Args:
            name: argument of the data module.
        """
        if self.data is None or self.data.kind is None or self.data.kind.path != _PROMPTS:
            return None
        source = self.data.arguments.get(name)
        if isinstance(source, str) and not is_url(source):
            files = as_rows(source)
        else:
            files = None
        if not isinstance(files, Files) or any(path.endswith(".parquet") for path in files.paths):
            return None
        return (located for located in files.rows() if not isinstance(located[1], BadRow))

    @property
    def columns(self) -> Columns:
        """Columns of the data module."""
        if self.data is None:
            mapping = None
        else:
            mapping = self.data.arguments.get("columns")
        texts = {}
        if isinstance(mapping, dict):
            texts = {name: column for name, column in mapping.items() if isinstance(column, str)}
        return Columns(texts, (PROMPT, (("chosen", "chosen"),), *REWARD_FIELDS))  # of PromptDataModule


def early_mistakes(config: dict[str, Any], command: str = "fit") -> Iterator[str]:
    """Yield a message for each mistake in the files of a run, and in settings that belong together.

    Args:
        config: content of the configuration files and options of a run.
        command: command that runs it; only ``fit`` needs a whole batch of training rows.
    """
    run = _run_of(config, command)
    yield from _messages(run, [
        _check_checkpoint, _check_directory, _check_loggers, _check_strategy, _check_accelerator, _check_time,
        _check_models, _check_data, _check_loops, _check_val_metric, _check_sizes, _check_rewards,
    ])  # fmt: skip


def mistakes_of_settings(config: dict[str, Any] | None) -> Iterator[str]:
    """Yield a message for each mistake in settings of a run that belong together, such as sizes of batches.

    Args:
        config: content of the configuration files and options of a run; None without a file.
    """
    if config is not None:
        yield from _messages(_run_of(config, "fit"), [_check_loops, _check_val_metric, _check_sizes])


def _run_of(config: dict[str, Any], command: str) -> _Run:
    """Return the parts of a configuration that the checks compare."""
    first: dict[str, UsedClass | None] = {
        section: next(classes_in(config.get(section), section, None), None) for section in ("model", "data")
    }
    callbacks = of_kind(of_kind(config.get("trainer"), dict).get("callbacks"), list)
    used = [next(classes_in([callback], "trainer.callbacks", None), None) for callback in callbacks]
    return _Run(config, command, first["model"], first["data"], [kind for kind in used if kind is not None])


def _messages(run: _Run, checks: Iterable[Callable[[_Run], None]]) -> Iterator[str]:
    """Yield the messages of the checks that fail."""
    for check in checks:
        try:
            check(run)
        except ExpectedError as error:
            yield str(error)


def _check_checkpoint(run: _Run) -> None:
    path = run.config.get("ckpt_path")
    is_local = isinstance(path, str) and "://" not in path and path not in ("last", "best", "hpc", "registry", "null")
    if is_local and not Path(str(path)).expanduser().exists():
        raise MissingFileError(f"no checkpoint at {path}")


def _check_directory(run: _Run) -> None:
    directory = run.trainer.get("default_root_dir")
    if isinstance(directory, str) and "://" not in directory:
        check_permission(Path(directory), renames=False)


def _check_loggers(run: _Run) -> None:
    for entry in entries_of(run.trainer.get("logger")):
        path = entry.get("class_path") if isinstance(entry, dict) else entry
        module, _, name = str(path).rpartition(".")
        package = _PACKAGES_OF_LOGGERS.get(name)
        if package and module.startswith(("lightning", "pytorch_lightning")) and find_spec(package) is None:
            raise MissingPackageError(
                f"{name} needs the package {package}: run pip install 'lightning-rlhf[{package}]'"
            )


def _check_strategy(run: _Run) -> None:
    name = run.trainer.get("strategy")
    if isinstance(name, str) and name.startswith("rlhf_") and name not in REGISTERED:
        raise UsageError(unknown_strategy(name, name, list(REGISTERED)))


def _check_accelerator(run: _Run) -> None:
    name = run.trainer.get("accelerator")
    if name in ("gpu", "cuda") and not Machine.here(os.environ).has_gpu:
        raise UsageError(f"trainer.accelerator is {name!r}, but this machine has no NVIDIA GPU: remove it, or set cpu")


def _check_time(run: _Run) -> None:
    time = run.trainer.get("max_time")
    is_text = isinstance(time, str) and isinstance(_read(time), str)  # null and {minutes: 3} are allowed, too
    if is_text and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(time).strip()):
        raise UsageError(
            f"trainer.max_time must be days:hours:minutes:seconds, such as 00:01:30:00 for 90 minutes, got {time!r}"
        )


def _check_models(run: _Run) -> None:
    if run.module is None:
        return
    for name, value in run.module.arguments.items():
        source = next(classes_in(value, "model", None), None)
        if source is not None and source.kind is not None and source.kind.path == f"{_SOURCES}.Pretrained":
            value = source.arguments.get("path")
            _check_frozen_weights(name, source.arguments)
        known = run.module.known.get(name)
        if known is None or known.expression is None:
            annotation = ""
        else:
            annotation = ast.unparse(known.expression)
        # A name without a slash can be that of a role.
        if "ModelSource" in annotation and isinstance(value, str) and "/" in value:
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
    if run.data is None:
        return
    for name in ("train", "val"):
        for part in entries_of(run.data.arguments.get(name)):
            if isinstance(part, str) and not is_url(part):
                as_rows(part)
    size = _size(run.data, "batch_size") or 1
    first = list(itertools.islice(run.rows() or (), size))
    if not first:
        return
    if run.command == "fit" and not run.data.arguments.get("sampler"):  # a sampler may repeat rows
        check_batch_size(size, len(first))
    location, row = first[0]
    fields = run.columns.find(row)
    if not {"prompt", "messages", "chosen"} & fields.names.keys() and run.data.arguments.get("on_bad_row") != "skip":
        try:
            fields["prompt"]
        except BadRow as error:
            raise UsageError(f"train data: {location}: {error}") from error


def _check_loops(run: _Run) -> None:
    if run.module is None:
        return
    kind = run.module.kind
    if kind is not None and kind.is_subclass(_MODULE) and _is_ours(kind):
        others = [callback.kind for callback in run.callbacks if callback not in run.loops]
        provided = bool(run.loops) or not all(kind is not None and _is_ours(kind) for kind in others)
        check_loops(kind.name, len(run.loops), provided)


def _is_ours(kind: SourceClass) -> bool:
    """Return whether a class is part of this package or of Lightning, so that its methods are known."""
    return kind.module.name.partition(".")[0] in ("lightning_rlhf", "lightning")


def _check_val_metric(run: _Run) -> None:
    for loop in run.loops:
        rewards, metric = loop.arguments.get("rewards") or [], loop.arguments.get("val_metric")
        if (
            isinstance(metric, str)
            and isinstance(rewards, list)
            and all(isinstance(reward, dict) for reward in rewards)
        ):
            labels = [
                entry.get("name") or str(entry.get("function")).replace(":", ".").split(".")[-1] for entry in rewards
            ]
            labels += [ENVIRONMENT] if loop.arguments.get("environment") else []
            if not any("class_path" in reward for reward in rewards):
                check_val_metric(metric, labels)


def _check_sizes(run: _Run) -> None:
    if len(run.loops) != 1 or run.module is None or run.data is None:
        return
    (loop,) = run.loops
    if loop.kind is None or loop.kind.path != _LOOP:
        return  # a subclass may count prompts in another way
    if not all(part.arguments.keys() <= part.known.keys() for part in (loop, run.module, run.data)):
        return  # a misspelt name may be that of a size
    group_size, prompts = _size(loop, "group_size"), _size(run.data, "batch_size")
    minibatch = _size(run.module, "minibatch_size")
    estimator = _estimator(run.module)
    if estimator is not None and estimator.attribute("needs_groups") and group_size is not None:
        check_group_size(estimator.name, group_size)
    if group_size and prompts and minibatch and "dynamic_sampling" not in loop.arguments:
        check_minibatch_size(prompts, group_size, minibatch)


def _estimator(module: UsedClass) -> Any:
    """Return the class of the estimator of advantages; None if it is unknown."""
    estimator = next(classes_in(module.arguments.get("advantages"), "model.advantages", None), None)
    known = module.known.get("advantages")
    if estimator is not None or known is None or "advantages" in module.arguments:
        if estimator is None:
            return None
        return estimator.kind
    module_of_default = known.default_module or known.module
    if isinstance(known.default, ast.Call):
        return module_of_default.evaluate(known.default.func)
    return None


def _size(used: UsedClass, name: str) -> int | None:
    """Return a number among the arguments of a class, or its default; None if it is unknown."""
    value, parameter = used.arguments.get(name), used.known.get(name)
    if name not in used.arguments and parameter is not None and isinstance(parameter.default, ast.Constant):
        value = parameter.default.value
    if isinstance(value, str):  # of the command line
        value = _read(value)
    if isinstance(value, int) and value > 0:
        return value
    return None


def _read(text: str) -> Any:
    """Return the value that a text has in YAML; the text itself if it is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _check_rewards(run: _Run) -> None:
    """Load the functions in files that import no other package, and compare their arguments with the columns."""
    if len(run.loops) != 1:
        return
    (loop,) = run.loops
    rewards = [
        RewardFunction(entry["function"], name=entry.get("name"))
        for entry in of_kind(loop.arguments.get("rewards"), list)
        if isinstance(entry, dict)
        and entry.keys() <= {"function", "name", "weight"}
        and isinstance(entry.get("name"), str | None)
        and _loads_quickly(entry.get("function"))
    ]
    further = CONVERSATION_COLUMNS if loop.arguments.get("environment") else ()
    first = next(run.rows() or iter(()), None)
    try:
        if first is not None:
            check_rewards(rewards, _reward_columns(run, [first]), further)
    except UsageError:  # other rows may have further columns
        sources = [run.rows(name) for name in ("train", "val") if run.data is not None and run.data.arguments.get(name)]
        if None not in sources:
            check_rewards(rewards, _reward_columns(run, itertools.chain.from_iterable(filter(None, sources))), further)


def _reward_columns(run: _Run, rows: Iterable[tuple[str, Row]]) -> list[str]:
    """Return the names of all columns of rows that reward functions get."""
    columns = run.columns
    names = set[str]()
    for _, row in rows:
        fields = columns.find(row)
        names.update(columns.other_columns(fields, exclude=("prompt", "messages", "images")))
        if may_have_images(fields):
            names.add("images")
    return sorted(names)


def _loads_quickly(reference: Any) -> bool:
    """Return whether a reference is of a function in a file that imports modules of Python's library alone."""
    source = of_kind(reference, str).rpartition(":")[0]
    if not source.endswith(".py"):
        return False
    path = next((candidate for folder in (".", *sys.path) if (candidate := Path(folder, source)).is_file()), None)
    if path is None:
        return True  # the message that it is missing needs no import
    try:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    except (SyntaxError, ValueError):
        return True
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
