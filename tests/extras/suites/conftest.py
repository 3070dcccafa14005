"""Fixtures of the tests of suites: a small model, and stand-ins of the packages."""

from tests.cli.conftest import _elsewhere, tiny_export

__all__ = ["_elsewhere", "tiny_export"]
