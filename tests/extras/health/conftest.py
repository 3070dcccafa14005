"""The run of a few steps that tests of callbacks share."""

from tests.callbacks.conftest import run  # noqa: F401
