"""A run's configuration, parsed and checked, for commands that make only parts of it."""

from __future__ import annotations

import sys
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.cli.config_classes import check_classes
from lightning_rlhf.cli.main import RLHFCLI, Stopped, quiet, refusals_told
from lightning_rlhf.modules.role_module import RoleModule


class ConfigCLI(RLHFCLI):
    """Understands a run's configuration and makes nothing of it."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse what is given, whatever the process was started with."""
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def understood(arguments: list[str], cli: type[ConfigCLI] = ConfigCLI) -> Namespace:
    """The configuration of ``fit``; a mistake in it ends the process with a sentence and code 2.

    Args:
        arguments: as ``fit`` takes them.
        cli: with further arguments of a command.
    """
    quiet()
    try:
        return cli(["fit", *arguments]).config["fit"]
    except Stopped as stopped:
        print(f"lightning-rlhf: {stopped}", file=sys.stderr)
        sys.exit(stopped.code)


def module_of(config: Namespace) -> Any:
    """The module of a configuration; its models are not built.

    Args:
        config: of ``fit``, parsed.
    """
    return _made(config, "model", RoleModule)


def data_of(config: Namespace) -> Any:
    """The data module of a configuration, which has read nothing yet.

    Args:
        config: of ``fit``, parsed.
    """
    return _made(config, "data", LightningDataModule)


def _made(config: Namespace, key: str, base: type) -> Any:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(base, key, subclass_mode=True)
    with refusals_told(parser):
        check_classes(config[key])
        return parser.instantiate_classes(Namespace({key: config[key]}))[key]
