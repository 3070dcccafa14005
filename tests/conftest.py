"""Fixtures for all tests: fixed random seeds, a restored environment, tiny models."""

import gc
import logging
import os
import random
from collections import Counter

import pytest
import torch
from jaxtyping import install_import_hook
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests import figures, shapes

# Calls of the mathematics check the shapes of tensors in every test; before anything imports these modules.
install_import_hook(["lightning_rlhf.functional", "lightning_rlhf.objectives"], f"{shapes.__name__}.check_tensors")

from lightning_rlhf.data.tokenizers import CharacterTokenizer  # noqa: E402
from tests.stand_ins import TinyModel  # noqa: E402

# Folders whose tests share engines, or the process that ranks and runs are forked from.
ONE_WORKER = ("tests/rollout/", "tests/distributed/", "tests/faults/")

# Warnings that Lightning emits for every small Trainer; an ``error`` filter in setup.cfg would fail the test.
_NOISE = (
    r"ignore:You defined a `validation_step` but have no `val_dataloader`",
    r"ignore:.*module\(s\) in eval mode at the start of training",
)


def pytest_configure(config):
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hides hints about the hardware
    for line in _NOISE:
        config.addinivalue_line("filterwarnings", line)


def pytest_runtest_setup(item):
    figures.begin(item)


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" reads the marks
def pytest_collection_modifyitems(items):
    """Mark all cases of a test but the first few as slow where `quick_cases` gives their number."""
    seen = Counter()
    for item in items:
        quick = item.get_closest_marker("quick_cases")
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if quick and seen[test] > quick.args[0]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Keep all that is imported by now out of garbage collection, which would take a fifth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep tests that share fixtures on one worker: those of a file, and those of some folders."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return next((folder for folder in ONE_WORKER if file.startswith(folder)), file)

    return ByFixtures(config, log)


@pytest.fixture(autouse=True)
def _same_start():
    """Start every test from the same random state, and restore the environment and torch's global settings after it."""
    os.environ.pop("PL_GLOBAL_SEED", None)  # for good: the next module's fixtures begin before its first test does
    environment = dict(os.environ)
    random.seed(0)
    torch.manual_seed(0)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("lightning")]
    states = [(logger, logger.level, logger.disabled, logger.propagate, [*logger.handlers]) for logger in loggers]
    has_group = torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized() and not has_group:
        torch.distributed.destroy_process_group()  # of a run that was refused, which Lightning leaves
    for logger, level, disabled, propagate, handlers in states:
        if logger.level != level:
            logger.setLevel(level)  # clears the caches of all loggers
        logger.disabled = disabled
        logger.propagate = propagate
        logger.handlers[:] = handlers
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def _exact_norm(norm, hidden):
    """Compute LlamaRMSNorm in the dtype of its input; its own code casts to float32."""
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


@pytest.fixture
def exact(monkeypatch):
    """Make the code compute in float64 instead of float32, so that tests can compare to twelve digits."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(LlamaRMSNorm, "forward", _exact_norm)
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def tiny():
    """A llama model of two layers."""
    return TinyModel()


@pytest.fixture
def tokenizer():
    """A tokenizer of four special tokens and the letters a to g, the vocabulary of the tiny model."""
    return CharacterTokenizer("abcdefg").load()


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    from tests.extras.report.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")

    made = Browser()
    yield made
    made.close()
