"""The runs of tests/callbacks."""

from tests.callbacks.conftest import run  # noqa: F401
