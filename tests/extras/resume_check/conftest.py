"""Fixtures of the tests of the command line."""

from tests.cli.conftest import _elsewhere, cli, config, fit

__all__ = ["_elsewhere", "cli", "config", "fit"]
