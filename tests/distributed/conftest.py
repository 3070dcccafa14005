"""DeepSpeed compiles an extension at its first use on a machine; the build starts before the tests of this folder."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lightning_rlhf.strategies.extension_builds import build_folders, is_open
from tests.distributed.launch import ROOT, run_ranks

_FUNCTION = "tests.distributed.tasks:start_deepspeed"
_BUILD = pytest.StashKey()
_BUILT = pytest.StashKey()


def pytest_collection_finish(session):
    """Start the build, which takes a minute, while other tests run before those of this folder."""
    first_worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    needed = any(item.nodeid.startswith("tests/distributed/") for item in session.items)
    if first_worker and needed and find_spec("deepspeed") and not session.config.option.collectonly:
        _remove_stale_locks()
        command = f"from tests.distributed.launch import run_ranks; run_ranks({_FUNCTION!r}, 1, seconds=1500)"
        session.config.stash[_BUILD] = subprocess.Popen(
            [sys.executable, "-c", command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def _remove_stale_locks():
    """Remove locks of killed builds, because torch waits for their removal without a timeout."""
    for name in ("deepspeed_shm_comm", "cpu_adam"):
        for folder in build_folders(name):
            lock = folder / "lock"
            if lock.exists() and not is_open(lock):
                lock.unlink(missing_ok=True)


def pytest_unconfigure(config):
    """Wait for the build; killing it would leave its lock behind."""
    if build := config.stash.get(_BUILD, None):
        build.wait()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Wait for the build before the first test, outside of its time limit: a busy machine compiles for minutes."""
    if find_spec("deepspeed") and _BUILT not in item.config.stash:
        item.config.stash[_BUILT] = _build()
    return (yield)


def _build():
    """Return why DeepSpeed cannot start, or None."""
    try:
        run_ranks(_FUNCTION, 1, seconds=1500)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _deepspeed_is_built(pytestconfig):
    if reason := pytestconfig.stash.get(_BUILT, None):
        pytest.fail(reason)
