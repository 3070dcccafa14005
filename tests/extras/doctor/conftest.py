"""Fixtures of the tests of the command line."""

from tests.cli.conftest import _elsewhere, cli, config, fit, tiny_export

__all__ = ["_elsewhere", "cli", "config", "fit", "tiny_export"]
