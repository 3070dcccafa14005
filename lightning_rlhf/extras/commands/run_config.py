"""A run's configuration, parsed and checked, for commands that use parts of it without a Trainer."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.cli.config_files import check_classes
from lightning_rlhf.cli.constructors import constructor_errors, make
from lightning_rlhf.cli.errors import unprinted
from lightning_rlhf.cli.main import RLHFCLI
from lightning_rlhf.cli.screen import configure_messages
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import ExpectedError
from lightning_rlhf.modules.role_module import RoleModule


class ConfigCLI(RLHFCLI):
    """Parses the configuration of a run for the command ``shown_command``, and instantiates nothing."""

    shown_command = "export"

    def instantiate_classes(self) -> None:
        """Instantiate nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def parse_run_config(arguments: list[str], cli: type[ConfigCLI] = ConfigCLI) -> Namespace:
    """Parse the configuration of ``fit``; exit with code 2 and a message if it is invalid."""
    configure_messages()
    try:
        return cli(["fit", *arguments]).config["fit"]
    except ExpectedError as error:
        if message := unprinted(str(error)):
            print(f"lightning-rlhf: {message}", file=sys.stderr)
        sys.exit(2)


def make_module(config: Namespace) -> Any:
    """Return the module of a parsed configuration; its models are not built."""
    return make(config, "model", RoleModule)


def make_data(config: Namespace) -> Any:
    """Return the data module of a parsed configuration, before it reads the data."""
    return make(config, "data", LightningDataModule)


def loop_arguments(config: Namespace) -> Namespace:
    """Return the arguments of a parsed configuration's RolloutLoop; empty without one."""
    loops = callbacks_of(config, RolloutLoop)
    if loops:
        return loops[0]["init_args"]
    return Namespace()


def make_environment(config: Namespace) -> EnvironmentSettings | None:
    """Return the settings of the environment of a parsed configuration; None without one.

    Raises:
        ValueError: the settings are invalid.
    """
    settings = loop_arguments(config).get("environment")
    if settings is None:
        return None
    parser = LightningArgumentParser()
    parser.add_argument("--environments", type=list[EnvironmentSettings])
    with constructor_errors(parser):
        check_classes(settings)
        made: EnvironmentSettings = parser.instantiate_classes(Namespace(environments=[settings]))["environments"][0]
    return made


def callbacks_of(config: Namespace, kind: type) -> list[Namespace]:
    """Return the entries of a parsed configuration for callbacks of a class or its subclasses."""
    return [entry for entry in config["trainer"]["callbacks"] or () if is_class(entry, kind)]


def is_class(entry: Namespace, kind: type) -> bool:
    """Return whether the ``class_path`` of an entry names a class or one of its subclasses."""
    module, _, name = entry["class_path"].rpartition(".")
    return issubclass(getattr(import_module(module), name), kind)
