"""``lightning-rlhf fit --config x.yaml``: LightningCLI with defaults for runs and errors for people."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

import lightning_rlhf.callbacks as callbacks
from lightning_rlhf.cli.earlier_run import check_can_be_written, check_reads_elsewhere, put_back, set_aside
from lightning_rlhf.cli.parser import FriendlyParser, explain
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.rollout.engine import EngineDied
from lightning_rlhf.strategies.checkpoint_io import AtomicCheckpointIO
from lightning_rlhf.strategies.names import our_name

log = logging.getLogger("lightning_rlhf")
# Said at every run by Lightning, and not for our users: rows are tokenised beforehand, so there is nothing for loader
# workers to do; roles are put into their mode one by one; what is logged is that of all ranks already; the last is
# Lightning's own use of a renamed torch function.
_NOISE = (
    r".*does not have many workers.*",
    r".*module\(s\) in eval mode.*",
    r".*recommended to use `self.log\(.*sync_dist=True\)`.*",
    r".*isinstance\(treespec, LeafSpec\).*",
)
_TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


# What this package raises on purpose; a KeyError or an AssertionError is a bug and shows its traceback.
_SENTENCES = (ValueError, RuntimeError, FileNotFoundError, ModuleNotFoundError, FloatingPointError)


class Stopped(ValueError):
    """A run that ended with a sentence for its user.

    Args:
        message: the sentence.
        code: 2 before the first training step, 1 from then on.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's directory."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration as it was understood."""
        if stage != "fit" or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, path, skip_none=False, overwrite=True, multifile=False)


class RLHFCLI(LightningCLI):
    """LightningCLI with the callbacks every run wants; one given in the configuration replaces the default.

    Args:
        arguments: without the program's name; None takes those of the process.
    """

    def __init__(self, arguments: list[str] | None = None) -> None:
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
        directory = given.get("default_root_dir") or "runs/default"
        kwargs["default_root_dir"] = str(directory)
        kwargs["plugins"] = [*(given.get("plugins") or []), AtomicCheckpointIO()]
        if isinstance(given.get("strategy"), str):
            processes = process_count(given.get("accelerator"), given.get("devices"), given.get("num_nodes") or 1)
            kwargs["strategy"] = our_name(given["strategy"], processes)
        if given.get("logger") is None:
            kwargs["logger"] = TensorBoardLogger(directory, name="", version="tensorboard")
        if given.get("enable_progress_bar") is None:
            kwargs["enable_progress_bar"] = sys.stdout.isatty()
        trainer: Any = super().instantiate_trainer(**kwargs)
        if kwargs.get("enable_progress_bar") and trainer.progress_bar_callback is not None:
            trainer.callbacks.remove(trainer.progress_bar_callback)
            trainer.callbacks.append(callbacks.StepProgressBar())
        trainer.callbacks = callbacks.complete(trainer.callbacks)
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Leave it alone: a run is made of what stands in its configuration; AtomicCheckpointIO reads checkpoints."""

    def instantiate_classes(self) -> None:
        """Make module, data and Trainer."""
        with refusals_told(self.parser):
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        """Run; what this package raises on purpose is a sentence, and what Lightning refuses before it trains.

        Any other error keeps its traceback.
        """
        trainer: Any = self.trainer
        directory = Path(trainer.default_root_dir)
        resumed = self._get(self.config_init, "ckpt_path") is not None
        fresh = subcommand == "fit" and not resumed and not trainer.fast_dev_run and trainer.is_global_zero
        earlier = None
        try:
            check_can_be_written(directory, fresh)
            if fresh and (directory / "config.yaml").is_file():
                check_reads_elsewhere(self.config[subcommand], directory)
                earlier = set_aside(directory)
            super()._run_subcommand(subcommand)
        except BaseException as error:  # an interrupt too puts the earlier run back
            started = trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
            if earlier is not None and not started and not isinstance(error, EngineDied):  # its log is needed
                put_back(earlier, directory)
            if not started and is_refusal_of_lightning(error):
                raise Stopped(one_line(error), code=2) from error
            if is_interrupt(error):
                raise Stopped(interrupted(trainer, started), code=1) from None
            if not isinstance(error, Exception) or not is_for_users(error):
                raise
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            raise Stopped(str(error), code=1 if started else 2) from error


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
            raised.append(error)
            raise

    parser.add_instantiator(instantiate, object)
    try:
        yield
    except Exception as error:
        refused_by_lightning = is_refusal_of_lightning(error)
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
        Exit code: 0, or 2 for a mistake found before training, or 1 for a failure in it.
    """
    quiet()
    try:
        RLHFCLI(arguments)
    except Stopped as stopped:
        print(f"lightning-rlhf: {stopped}", file=sys.stderr)
        return stopped.code
    return 0


def quiet() -> None:
    """Leave on the screen what is worth reading."""
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    speaks = getattr(rank_zero_only, "rank", 0) == 0  # the other ranks would say it again
    log.setLevel(logging.INFO if speaks else logging.WARNING)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False


def is_for_users(error: Exception) -> bool:
    """Whether this package raised the error on purpose, so that its message is a sentence for users."""
    if isinstance(error, EngineDied):
        return True
    return isinstance(error, _SENTENCES) and place(error).startswith("lightning_rlhf.")


def is_refusal_of_lightning(error: BaseException) -> bool:
    """Whether Lightning raised the error because it cannot do what it was asked for."""
    kinds = MisconfigurationException | ValueError | RuntimeError | ImportError
    return isinstance(error, kinds) and place(error).startswith("lightning.")


def is_interrupt(error: BaseException) -> bool:
    """Whether somebody pressed Ctrl-C; Lightning makes an exit of it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
    )


def interrupted(trainer: Trainer, started: bool) -> str:
    """What was reached, and how to go on from there."""
    if not started:
        return "interrupted before the first step"
    last = Path(trainer.default_root_dir) / "checkpoints/last.ckpt"
    told = f"interrupted after step {trainer.global_step}"
    if last.exists():
        return f"{told}; the same command with --ckpt_path last goes on from {last}"
    return f"{told}, before a checkpoint was due: RunCheckpoint's every_n_steps says how often one is written"


def place(error: BaseException) -> str:
    """The dotted name of the module whose code raised the error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", ""))


def one_line(error: BaseException) -> str:
    """The error's message without its line breaks."""
    return " ".join(str(error).split())
