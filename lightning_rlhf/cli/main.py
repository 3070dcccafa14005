"""``lightning-rlhf fit --config x.yaml``: LightningCLI with defaults for runs and errors for people."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

import lightning_rlhf.callbacks as callbacks
from lightning_rlhf.cli.parser import FriendlyParser
from lightning_rlhf.modules.roles import RoleModule
from lightning_rlhf.rollout.engine import EngineDied
from lightning_rlhf.strategies.checkpoint_io import AtomicCheckpointIO

# Said at every run by Lightning, and not for our users: rows are tokenised beforehand, so there is nothing for loader
# workers to do, and roles are put into their mode one by one.
_NOISE = (r".*does not have many workers.*", r".*module\(s\) in eval mode.*", r".*isinstance\(treespec, LeafSpec\).*")
_TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
_USER_ERRORS = (ValueError, FileNotFoundError, ModuleNotFoundError)


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's directory; a resumed run writes its own beside it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration as it was understood."""
        if trainer.fast_dev_run or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, path, skip_none=False, overwrite=True, multifile=False)


class RLHFCLI(LightningCLI):
    """LightningCLI with the callbacks every run wants; one given in the configuration replaces the default."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the default callbacks and the checkpoint files that survive a crash."""
        given = self._get(self.config_init, "trainer")
        directory = Path(given.get("default_root_dir") or "runs/default")
        if given.get("logger") is None:
            kwargs["logger"] = TensorBoardLogger(directory, name="", version="tensorboard")
        if given.get("enable_progress_bar") is None:
            kwargs["enable_progress_bar"] = sys.stdout.isatty()
        kwargs["default_root_dir"] = str(directory)
        kwargs["plugins"] = [*(given.get("plugins") or []), AtomicCheckpointIO()]
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks = callbacks.complete(trainer.callbacks)
        return trainer


def run(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        Exit code: 0, or 2 for a mistake found before training, or 1 for a failure in it.
    """
    quiet()
    cli = None
    try:
        cli = RLHFCLI(
            RoleModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=FriendlyParser,
            save_config_callback=SaveRunConfig,
            seed_everything_default=42,
            trainer_defaults=_TRAINER_DEFAULTS,
            parser_kwargs={"parser_mode": "yaml"},
            args=arguments,
            run=True,
        )
    except (*_USER_ERRORS, RuntimeError, FloatingPointError, EngineDied) as error:
        print(f"lightning-rlhf: {error}", file=sys.stderr)
        return 1
    return 0


def quiet() -> None:
    """Leave on the screen what is worth reading."""
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    ours = logging.getLogger("lightning_rlhf")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
