"""What tests of several servers share."""

import time

import torch

from lightning_rlhf.types import SamplingParams
from tests.extras.servers.stub_server import GENERATE
from tests.rollout.engines import ARCHITECTURE

VOCABULARY = ARCHITECTURE["vocab_size"]
SAMPLING = SamplingParams(4)
PARAMETERS = [("w", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2))]
FAIR_SHARE_AT_LEAST = 14  # of 40 responses by two servers of one speed: a fair share is 20, and their threads race


def prompts(count):
    """Return prompts of two tokens; a stub answers each with itself."""
    return [[4 + number % (VOCABULARY - 4)] * 2 for number in range(count)]


def shares(stubs):
    """Return the number of responses that each server was asked for."""
    return [stub.generated() for stub in stubs]


def members(engine):
    """Return the servers as the engine sees them."""
    return engine._running.members


def all_used(engine):
    return all(member.is_used for member in members(engine))


def until(condition):
    """Wait until a condition holds; 10 s at most."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 10 s"
        time.sleep(0.01)


def slowly(stub, seconds, path=GENERATE):
    """Let a server answer requests, those for responses unless another path is given, after some time."""
    stub.before_answers(path, lambda: time.sleep(seconds))
