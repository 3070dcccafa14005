"""What has to be there before the first run of several processes."""

from importlib.util import find_spec

import pytest

from tests.distributed.launch import run_ranks


@pytest.fixture(scope="session", autouse=True)
def _deepspeed_is_built():
    """DeepSpeed compiles an extension at its first use on a machine, which takes minutes, and not those of a test."""
    if find_spec("deepspeed"):
        run_ranks("tests.distributed.tasks:start_deepspeed", 1)
