"""``lightning-rlhf fit --config x.yaml``: LightningCLI with this package's defaults and one-line errors."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

import lightning_rlhf.callbacks as callbacks
from lightning_rlhf.callbacks.survival.checkpoint import check_copies, checkpoint_to_resume
from lightning_rlhf.callbacks.survival.graceful_shutdown import can_resume, how_to_resume
from lightning_rlhf.cli.config_files import check_classes, wants_help
from lightning_rlhf.cli.constructors import constructor_errors, failures
from lightning_rlhf.cli.earlier_run import (
    DIRECTORY,
    RunRecord,
    check_reads_elsewhere,
    check_writable,
    found_checkpoint,
    log_renamed_run,
    rename_earlier_run,
    restore_earlier_run,
)
from lightning_rlhf.cli.early import check_early
from lightning_rlhf.cli.errors import (
    CLIError,
    disk_error,
    in_one_message,
    interrupt_of,
    one_line,
    one_line_errors,
    print_cause,
    printed,
)
from lightning_rlhf.cli.merging import CLASS_KEYS, as_yaml, merged_settings
from lightning_rlhf.cli.parser import ConfigParser, reports_errors
from lightning_rlhf.cli.screen import configure_messages, last_line
from lightning_rlhf.cli.signatures import find_class
from lightning_rlhf.cli.strategy_choice import find_strategy, process_count
from lightning_rlhf.compat import is_lightning_error
from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import EngineDied, ExpectedError, UsageError
from lightning_rlhf.loggers import log_configuration, save_run_ids, with_run_ids
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.modules.trainer_settings import check_trainer
from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO
from lightning_rlhf.strategies.names import our_name

log = logging.getLogger("lightning_rlhf")
_OPTIMIZER = "torch.optim.optimizer.Optimizer"
_TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}

# A Timer of Lightning has an enum among its defaults, which YAML cannot represent.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_str(str(member.value)))


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's directory, and its values into the loggers as hyperparameters.

    If a resumed run has a different configuration, the earlier file is renamed to ``config-<step>.yaml``, where step is
    the last step that used it.
    """

    _earlier: str | None = None
    renamed_run: Path | None = None  # directory of an earlier run, which has this name now

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Write the parsed configuration atomically."""
        if stage != "fit" or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_unset=False, skip_validation=True)
        settings = yaml.safe_load(text)
        earlier = path.read_text() if path.is_file() else ""
        if earlier and yaml.safe_load(earlier) | {"ckpt_path": settings["ckpt_path"]} != settings:
            self._earlier = earlier
        draft = path.with_name(f"{path.name}.new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
        for logger in trainer.loggers:
            log_configuration(logger, settings)
        save_run_ids(trainer.loggers, path.parent)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the earlier configuration under its last step, which is known now."""
        if self._earlier is not None and trainer.global_step > 0:
            path = Path(trainer.default_root_dir) / f"config-{trainer.global_step}.yaml"
            path.write_text(self._earlier)
            log.info("The configuration has changed; the previous one is in %s.", path)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Log the name of an earlier run in the first step: before it, a failure restores that run."""
        if self.renamed_run is not None:
            log_renamed_run(self.renamed_run, Path(trainer.default_root_dir))
            self.renamed_run = None


class RLHFCLI(LightningCLI):
    """LightningCLI with the default callbacks of a run; a configured callback replaces the default of its class.

    Args:
        arguments: command line without the program's name; None uses that of the process.
    """

    shown_command: ClassVar[str] = ""  # of a command with the options of fit that does not run it

    def __init__(self, arguments: list[str] | None = None) -> None:
        command_line = sys.argv[1:] if arguments is None else arguments
        self._command = command_line[0] if command_line else ""
        check_early(command_line[1:], self.shown_command or self._command)
        if any(argument.partition("=")[0].endswith(".help") for argument in command_line):
            public = import_module("lightning_rlhf")
            for name in public.__all__:  # jsonargparse finds a class by its plain name once it is imported
                getattr(public, name)
        self._arguments = command_line if wants_help(command_line) else [self._command, *_merged(command_line[1:])]
        super().__init__(
            RoleModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=ConfigParser,
            save_config_callback=SaveRunConfig,
            seed_everything_default=42,
            trainer_defaults=_TRAINER_DEFAULTS,
            args=arguments,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the merged content of the files and options."""
        self.config = parser.parse_args(self._arguments)
        trainer = self.config[self._command]["trainer"]
        if isinstance(trainer.get("callbacks"), Namespace):
            trainer["callbacks"] = [trainer["callbacks"]]

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command on the command line, or all for a help page: building the parser of each takes time."""
        commands = LightningCLI.subcommands()
        return {self._command: commands[self._command]} if self._command in commands else commands

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        """Let Lightning's own table of a validation be printed on request only: Console prints the same metrics."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if "verbose" in self._subcommand_method_arguments[subcommand]:
            parser.set_defaults(verbose=False)
        return parser

    def _dump_config(self) -> None:
        """Store the configuration as plain values, without Lightning's second validation of it."""
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(self.config, skip_unset=False, skip_validation=True, skip_link_targets=False)
            self.config_dump = yaml.safe_load(text)[self.config["subcommand"]]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the default callbacks, the run's loggers, and atomic writes of checkpoints."""
        settings = self._get(self.config_init, "trainer")
        check_trainer(settings)
        directory = settings.get("default_root_dir") or DIRECTORY
        kwargs["default_root_dir"] = str(directory)
        kwargs["plugins"] = [*(settings.get("plugins") or []), AtomicCheckpointIO()]
        if isinstance(settings.get("strategy"), str):
            nodes = settings.get("num_nodes") or 1
            processes = process_count(settings.get("accelerator"), settings.get("devices"), nodes)
            kwargs["strategy"] = find_strategy(settings["strategy"], processes)
            if (name := our_name(settings["strategy"], processes)) != settings["strategy"] != "auto":
                log.info("trainer.strategy %s is %s in this package.", settings["strategy"], name)
        if isinstance(settings.get("val_check_interval"), int) and settings.get("check_val_every_n_epoch") == 1:
            kwargs["check_val_every_n_epoch"] = None  # the interval counts steps, also over the ends of epochs
        if settings.get("logger") is None:
            kwargs["logger"] = TensorBoardLogger(directory, name="", version="tensorboard", default_hp_metric=False)
        if settings.get("enable_progress_bar") is None:
            has_bar = any(isinstance(callback, ProgressBar) for callback in settings.get("callbacks") or [])
            kwargs["enable_progress_bar"] = has_bar or sys.stdout.isatty()
        trainer: Any = super().instantiate_trainer(**kwargs)
        if kwargs.get("enable_progress_bar") and type(trainer.progress_bar_callback) is TQDMProgressBar:
            trainer.callbacks.remove(trainer.progress_bar_callback)
            trainer.callbacks.append(callbacks.StepProgressBar())
        trainer.callbacks = callbacks.complete(trainer.callbacks)
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Ignore hyper-parameters in the checkpoint; the YAML is the configuration."""

    def instantiate_classes(self) -> None:
        """Instantiate module, data and Trainer."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        trainer = config["trainer"]
        configured = trainer.get("logger")
        if config.get("ckpt_path") is not None:
            trainer["logger"] = with_run_ids(configured, Path(trainer.get("default_root_dir") or DIRECTORY))
        try:
            with constructor_errors(self.parser):
                check_classes(config)
                super().instantiate_classes()
        except CLIError as error:  # find the mistakes in the other parts, too
            others = failures(config, {"model": RoleModule, "data": LightningDataModule})
            raise CLIError(in_one_message(list(dict.fromkeys([*others, str(error)])))) from error
        trainer["logger"] = configured  # config.yaml is that of the first part of the run

    def after_fit(self) -> None:
        """Log why the run ended, and where its results are."""
        if self.trainer.is_global_zero:
            log.info(last_line(self.trainer))

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand; expected errors become a :class:`CLIError`, any other keeps its traceback."""
        trainer: Any = self.trainer
        directory = Path(trainer.default_root_dir)
        run_lock = the_offered("run_lock")
        earlier = record = None
        try:
            resumes = self._find_checkpoint(subcommand)
            writes = subcommand == "fit" and trainer.is_global_zero
            is_new = writes and not resumes and not trainer.fast_dev_run
            renames = is_new and (directory / "config.yaml").is_file()
            if is_new:
                check_copies(trainer)
            check_writable(directory, renames)
            if writes and not trainer.fast_dev_run:
                run_lock.lock_run(directory)
            if writes and resumes:
                record = RunRecord(directory)
            if renames:
                check_reads_elsewhere(self.config[subcommand], directory)
                renamed = rename_earlier_run(directory)
                run_lock.lock_run(directory)  # the new one; if another run was faster, nothing is restored
                earlier = renamed
                next(each for each in trainer.callbacks if isinstance(each, SaveRunConfig)).renamed_run = earlier
            super()._run_subcommand(subcommand)
        except BaseException as error:  # an interrupt, too, restores the earlier run
            started = trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
            if record is not None and not started:
                record.restore()
            if earlier is not None and not started:
                if isinstance(error, EngineDied):  # its message names its log, which is in the directory
                    log_renamed_run(earlier, directory)
                else:
                    restore_earlier_run(earlier, directory)
            if (cli_error := _cli_error(error, trainer, started)) is None:
                raise
            raise cli_error from error
        finally:
            run_lock.unlock_run(directory)

    def _find_checkpoint(self, subcommand: str) -> bool:
        """Return whether a checkpoint is read; replace ``last`` by the path of the last checkpoint if it exists.

        Raises:
            UsageError: there is no checkpoint, and the command needs one.
        """
        path = self._get(self.config_init, "ckpt_path")
        directory = Path(self.trainer.default_root_dir)
        is_fit = subcommand == "fit"
        checkpoint = checkpoint_to_resume(self.trainer, is_fit) if path == "last" else found_checkpoint(path, directory)
        if checkpoint is None and path == "last" and not is_fit:
            raise UsageError(
                f"{directory} has no last checkpoint to {subcommand}: remove --ckpt_path to "
                f"use the models of the configuration, or set it to the path of a checkpoint"
            )
        if is_fit and checkpoint is not None and Path(checkpoint).is_dir():  # callbacks look at it before it is loaded
            self.trainer.ckpt_path = checkpoint
        self.config_init[self.config_init["subcommand"]]["ckpt_path"] = None if self.trainer.ckpt_path else checkpoint
        return checkpoint is not None


def _merged(arguments: list[str]) -> list[str]:
    """Return arguments with one file, the merged content of all files and options; print which options were dropped."""
    settings = merged_settings(arguments)
    if reports_errors() and not printed:  # a mistake is the last line
        for line in dict.fromkeys(settings.dropped):
            print(line, file=sys.stderr)
    _check_rates(settings.values, "")
    if str(seed := settings.values.get("seed_everything")).startswith("-"):
        raise UsageError(f"seed_everything must be at least 0, got {seed}")
    config = [f"--config={as_yaml(settings.values)}"] if settings.values else []
    return [*config, *settings.arguments]


def _check_rates(value: Any, key: str) -> None:
    """Raise for an optimizer by name without its rate: torch would take one of its own, and no longer the module's."""
    if isinstance(value, list):
        for entry in value:
            _check_rates(entry, key)
    if isinstance(value, str) and key.endswith("optimizer"):
        value = {"class_path": value}
    if not isinstance(value, dict):
        return
    options = {name: part for name, part in value.items() if name not in CLASS_KEYS}
    options |= inner if isinstance(inner := value.get("init_args"), dict) else {}
    name = value.get("class_path")
    kind = (find_class(name) or find_class(f"torch.optim.{name}")) if isinstance(name, str) else None
    if kind is not None and _OPTIMIZER in kind.bases and "lr" in kind.options and "lr" not in options:
        raise UsageError(
            f"{key} ({kind.name}): lr is missing: an optimizer that is named by class_path has no rate of the module"
        )
    for name, part in options.items():
        _check_rates(part, f"{key}.{name}".lstrip("."))


def _cli_error(error: BaseException, trainer: Any, started: bool) -> CLIError | None:
    """Return the one-line error for an interrupt or an expected error; None for a bug.

    Args:
        error: error that ended the run.
        started: whether the first training step has begun.
    """
    code = 1 if started else 2
    progress = f"after step {trainer.global_step}; {how_to_resume(trainer)}" if started else ""
    if not started and is_lightning_error(error):
        return CLIError(one_line(error))
    if (interrupt := interrupt_of(error)) is not None:
        message = f"ended {interrupt.reason} {progress or 'before the first step'}"
        return CLIError(message if trainer.is_global_zero else "", interrupt.exit_code)
    if (reason := disk_error(error, Path(trainer.default_root_dir))) is not None:
        return CLIError(f"{reason}; stopped {progress}" if started else reason, code)
    if started and trainer.is_global_zero and can_resume(trainer):
        print(f"lightning-rlhf: failed {progress}", file=sys.stderr)
    # A callback of Lightning rejects a metric to monitor that is not logged in training.
    if not isinstance(error, ExpectedError) and not is_lightning_error(error, "lightning.pytorch.callbacks."):
        return None
    print_cause(error)
    return CLIError("\n".join([str(error), *getattr(error, "__notes__", ())]), code)


@one_line_errors
def run(arguments: list[str] | None = None) -> int:
    """Run one of Lightning's commands.

    Args:
        arguments: command line without the program's name; None uses that of the process.

    Returns:
        Exit code: 0, 2 for a mistake found before training, 1 for a failure in it, 130 after Ctrl-C, 143 after SIGTERM.
    """
    configure_messages()
    try:
        RLHFCLI(arguments)
    except ExpectedError as error:
        if getattr(error, "code", 2) == 2 and not reports_errors():  # another process of this machine prints it
            return 2
        raise
    return 0
