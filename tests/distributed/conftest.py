"""DeepSpeed compiles an extension at its first use on a machine; the tests of several processes begin with it built."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.distributed.launch import ROOT, run_ranks

_FUNCTION = "tests.distributed.tasks:start_deepspeed"
_BUILD = pytest.StashKey()


def pytest_collection_finish(session):
    """Start the build, which takes a minute, beside the tests that run before those of this folder."""
    first_worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    needed = any(item.nodeid.startswith("tests/distributed/") for item in session.items)
    if first_worker and needed and find_spec("deepspeed") and not session.config.option.collectonly:
        command = f"from tests.distributed.launch import run_ranks; run_ranks({_FUNCTION!r}, 1)"
        session.config.stash[_BUILD] = subprocess.Popen(
            [sys.executable, "-c", command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def pytest_unconfigure(config):
    """Wait for the build: one that is killed leaves a lock behind that would block the next."""
    if build := config.stash.get(_BUILD, None):
        build.wait()


@pytest.fixture(scope="session", autouse=True)
def _deepspeed_is_built():
    """Wait for the build, or build; the minute is not part of a test's time."""
    if find_spec("deepspeed"):
        run_ranks(_FUNCTION, 1)
