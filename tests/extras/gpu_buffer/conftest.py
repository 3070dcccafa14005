"""The engines of tests/rollout."""

from tests.rollout.conftest import engines, fault  # noqa: F401
