"""Fixtures of this folder."""

from tests.callbacks.conftest import run

__all__ = ["run"]
