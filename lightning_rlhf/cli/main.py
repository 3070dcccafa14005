"""``lightning-rlhf fit --config x.yaml``: LightningCLI with defaults for runs and errors for people."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

import lightning_rlhf.callbacks as callbacks
from lightning_rlhf.callbacks.checkpoint import check_copies, checkpoint_to_resume
from lightning_rlhf.callbacks.graceful_shutdown import can_resume, how_to_resume
from lightning_rlhf.cli.config_classes import check_aliases, check_classes, config_files, find_classes_beside
from lightning_rlhf.cli.earlier_run import check_can_be_written, check_reads_elsewhere, put_back, set_aside
from lightning_rlhf.cli.parser import FriendlyParser, explain, is_first_here
from lightning_rlhf.cli.screen import last_line, show_lightning
from lightning_rlhf.cli.trainer_settings import check_trainer, checked_strategy
from lightning_rlhf.expected_errors import is_expected, is_lightning_error
from lightning_rlhf.expected_errors import raising_module as place
from lightning_rlhf.interrupts import Interrupted
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.rollout.engine import EngineDied
from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO

log = logging.getLogger("lightning_rlhf")
# Said at every run by Lightning, and not for our users: rows are tokenised beforehand, so there is nothing for loader
# workers to do; roles are put into their mode one by one; what is logged is that of all ranks already; the last is
# Lightning's own use of a renamed torch function.
_NOISE = (
    r".*does not have many workers.*",
    r".*module\(s\) in eval mode.*",
    r".*recommended to use `self.log\(.*sync_dist=True\)`.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r"`torch.distributed.\w+` is deprecated.*",  # DeepSpeed's use of it
    r"\s*Unable to serialize instance cpu\b",  # jsonargparse's, of a torch.device among the defaults of a callback
    r"Using ModelCheckpoint with manual optimization.*",  # twelve lines at every save
)
_TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


_FULL = (errno.ENOSPC, errno.EDQUOT)


class Stopped(ValueError):
    """A run that ended with a sentence for its user.

    Args:
        message: the sentence; empty where another rank prints it.
        code: 2 before the first training step, 1 from then on; 128 and the number of the signal that ended the run.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


# A Lightning Timer has a choice among its defaults, which YAML cannot write.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, choice: dumper.represent_str(str(choice.value)))


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's directory, and its values into the loggers as hyperparameters.

    If a resumed run has a different configuration, the earlier one is renamed to ``config-<step>.yaml``, by the last
    step that it was used for.
    """

    _earlier: str | None = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Write the parsed configuration; a process that is killed meanwhile leaves the earlier file."""
        if stage != "fit" or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.new")
        self.parser.save(self.config, written, skip_none=False, overwrite=True, multifile=False)
        settings = yaml.safe_load(written.read_text())
        earlier = path.read_text() if path.is_file() else ""
        if earlier and yaml.safe_load(earlier) | {"ckpt_path": settings["ckpt_path"]} != settings:
            self._earlier = earlier
        written.replace(path)
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the earlier configuration under its last step, which is known now."""
        if self._earlier is not None and trainer.global_step > 0:
            kept = Path(trainer.default_root_dir) / f"config-{trainer.global_step}.yaml"
            kept.write_text(self._earlier)
            log.info("The configuration has changed: that of the steps up to now is %s.", kept)


class RLHFCLI(LightningCLI):
    """LightningCLI with the callbacks every run wants; one given in the configuration replaces the default.

    Args:
        arguments: without the program's name; None takes those of the process.
    """

    def __init__(self, arguments: list[str] | None = None) -> None:
        given = sys.argv[1:] if arguments is None else arguments
        find_classes_beside(given)
        if any(argument.partition("=")[0].endswith(".help") for argument in given):
            public = import_module("lightning_rlhf")
            for name in public.__all__:  # known by their plain names once they are imported
                getattr(public, name)
        try:
            for file in config_files(given):
                check_aliases(file)
        except ValueError as error:
            raise Stopped(str(error), code=2) from None
        super().__init__(
            RoleModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=FriendlyParser,
            save_config_callback=SaveRunConfig,
            seed_everything_default=42,
            trainer_defaults=_TRAINER_DEFAULTS,
            args=arguments,
        )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the default callbacks, the run's loggers, and checkpoint files that survive a crash."""
        given = self._get(self.config_init, "trainer")
        check_trainer(given)
        directory = given.get("default_root_dir") or "runs/default"
        kwargs["default_root_dir"] = str(directory)
        kwargs["plugins"] = [*(given.get("plugins") or []), AtomicCheckpointIO()]
        if isinstance(given.get("strategy"), str):
            processes = process_count(given.get("accelerator"), given.get("devices"), given.get("num_nodes") or 1)
            kwargs["strategy"] = checked_strategy(given["strategy"], processes)
        if given.get("logger") is None:
            kwargs["logger"] = TensorBoardLogger(directory, name="", version="tensorboard", default_hp_metric=False)
        if given.get("enable_progress_bar") is None:
            own_bar = any(isinstance(callback, ProgressBar) for callback in given.get("callbacks") or [])
            kwargs["enable_progress_bar"] = own_bar or sys.stdout.isatty()
        trainer: Any = super().instantiate_trainer(**kwargs)
        if kwargs.get("enable_progress_bar") and type(trainer.progress_bar_callback) is TQDMProgressBar:
            trainer.callbacks.remove(trainer.progress_bar_callback)
            trainer.callbacks.append(callbacks.StepProgressBar())
        trainer.callbacks = callbacks.complete(trainer.callbacks)
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Leave it alone: a run is made of what stands in its configuration; AtomicCheckpointIO reads checkpoints."""

    def instantiate_classes(self) -> None:
        """Make module, data and Trainer."""
        with refusals_told(self.parser):
            check_classes(self.config[self.subcommand] if self.subcommand else self.config)
            super().instantiate_classes()

    def after_fit(self) -> None:
        """Log why the run ended, and where its results are."""
        if self.trainer.is_global_zero:
            log.info(last_line(self.trainer))

    def _run_subcommand(self, subcommand: str) -> None:
        """Run; what this package raises on purpose is a sentence, and what Lightning refuses before it trains.

        Any other error keeps its traceback.
        """
        trainer: Any = self.trainer
        directory = Path(trainer.default_root_dir)
        earlier = None
        try:
            resumed = self._resumed(subcommand)
            fresh = subcommand == "fit" and not resumed and not trainer.fast_dev_run and trainer.is_global_zero
            if fresh:
                check_copies(trainer)
            check_can_be_written(directory, fresh)
            if fresh and (directory / "config.yaml").is_file():
                check_reads_elsewhere(self.config[subcommand], directory)
                earlier = set_aside(directory)
            super()._run_subcommand(subcommand)
        except BaseException as error:  # an interrupt too puts the earlier run back
            started = trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
            if earlier is not None and not started and not isinstance(error, EngineDied):  # its log is needed
                put_back(earlier, directory)
            if not started and is_lightning_error(error):
                raise Stopped(one_line(error), code=2) from error
            progress = f"after step {trainer.global_step}; {how_to_resume(trainer)}" if started else ""
            if (interrupt := interrupt_of(error)) is not None:
                ended = f"ended {interrupt.reason} {progress or 'before the first step'}"
                raise Stopped(ended if trainer.is_global_zero else "", interrupt.exit_code) from None
            if (trouble := disk_trouble(error, directory)) is not None:
                raise Stopped(f"{trouble}{started * '; stopped '}{progress}", code=1 if started else 2) from error
            if started and trainer.is_global_zero and can_resume(trainer):
                print(f"lightning-rlhf: failed {progress}", file=sys.stderr)
            if not isinstance(error, Exception) or not is_for_users(error):
                raise
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            raise Stopped(str(error), code=1 if started else 2) from error

    def _resumed(self, subcommand: str) -> bool:
        """Return whether a checkpoint is read; ``last`` becomes the path of it, if there is one.

        Raises:
            ValueError: there is none, and the command needs one.
        """
        given = self._get(self.config_init, "ckpt_path")
        if given != "last":
            return given is not None
        found = checkpoint_to_resume(self.trainer)
        if found is None and subcommand != "fit":
            raise ValueError(
                f"{self.trainer.default_root_dir} has no last checkpoint to {subcommand}: leave out --ckpt_path to "
                f"measure the models of the configuration, or give the path of a checkpoint"
            )
        self.config_init[self.config_init["subcommand"]]["ckpt_path"] = found
        return found is not None


@contextmanager
def refusals_told(parser: LightningArgumentParser) -> Iterator[None]:
    """While a parser makes objects, a constructor that refuses its arguments stops the run with its sentence.

    What was raised outside of this package and those that it is made with may be a bug: its traceback is shown too.
    """
    raised: list[Exception] = []

    def instantiate(made: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return made(*args, **kwargs)
        except Exception as error:  # jsonargparse hands on its text, and not always the error itself
            if isinstance(made, type) and issubclass(made, Logger) and made.__module__.startswith("lightning."):
                raise Stopped(f"trainer.logger: {made.__name__} cannot be made: {one_line(error)}", code=2) from error
            raised.append(error)
            raise

    parser.add_instantiator(instantiate, object)
    try:
        yield
    except Exception as error:
        refused_by_lightning = is_lightning_error(error)
        if not isinstance(error, ValueError) and not refused_by_lightning and not is_for_users(error):
            raise
        origin: BaseException = error
        while place(origin).startswith("jsonargparse.") and origin.__cause__ is not None:
            origin = origin.__cause__
        if place(origin).startswith("jsonargparse.") and raised:
            origin = raised[-1]
        if not place(origin).startswith(("lightning_rlhf.", "lightning.", "jsonargparse.")):
            traceback.print_exception(origin)
        raise Stopped(one_line(error) if refused_by_lightning else explain(str(error)), code=2) from error


def process_count(accelerator: Any, devices: Any, nodes: int) -> int:
    """Processes that the Trainer's arguments make, one per device; ``auto`` and -1 are all GPUs, or one CPU process."""
    if devices in (None, "auto", -1, "-1"):
        gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
        return max(gpus, 1) * nodes
    if isinstance(devices, str) and "," in devices:
        devices = [device for device in devices.split(",") if device.strip()]
    if isinstance(devices, str) and not devices.strip().isdigit():
        return nodes  # Lightning says what is wrong with it
    return (len(devices) if isinstance(devices, list) else int(devices)) * nodes


def run(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        Exit code: 0, 2 for a mistake found before training, 1 for a failure in it, 130 after Ctrl-C, 143 after SIGTERM.
    """
    quiet()
    try:
        RLHFCLI(arguments)
    except Stopped as stopped:
        if str(stopped) and (stopped.code != 2 or is_first_here()):
            print(f"lightning-rlhf: {stopped}", file=sys.stderr)
        return stopped.code
    return 0


def quiet() -> None:
    """Leave on the screen what is worth reading."""
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    show_lightning()
    speaks = getattr(rank_zero_only, "rank", 0) == 0  # the other ranks would say it again
    log.setLevel(logging.INFO if speaks else logging.WARNING)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False


def is_for_users(error: Exception) -> bool:
    """Whether this package raised the error on purpose, so that its message is a sentence for users."""
    # for example an EarlyStopping whose monitor is not logged
    refused_by_callback = is_lightning_error(error) and place(error).startswith("lightning.pytorch.callbacks.")
    return isinstance(error, EngineDied) or is_expected(error) or refused_by_callback


def interrupt_of(error: BaseException) -> Interrupted | None:
    """Return the request to end that an error carries, else None; Lightning turns one into an exit."""
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, Interrupted):
        return cause
    return Interrupted(signal.SIGINT) if isinstance(cause, KeyboardInterrupt) else None


def disk_trouble(error: BaseException, directory: Path) -> str | None:
    """Return a sentence about the run's disk or directory where one of them ended the run, else None.

    Args:
        error: that ended it.
        directory: of the run.
    """
    cause, seen = error, list[BaseException]()
    while cause is not None and cause not in seen:  # an error that is raised again may lead to itself
        seen.append(cause)
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return f"the disk of {directory} is full ({cause.strerror or cause}): make room on it"
        if isinstance(cause, FileNotFoundError) and cause.filename is not None:
            lost = Path(os.fsdecode(cause.filename))
            if lost.absolute().is_relative_to(directory.absolute()):
                return f"{lost} was removed while the run wrote to it: leave the run directory {directory} as it is"
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return None


def one_line(error: BaseException) -> str:
    """The error's message without its line breaks."""
    return " ".join(str(error).split())
