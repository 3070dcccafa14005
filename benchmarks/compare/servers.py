"""Throughput of one, two and four vLLM servers, and of two of which one is killed; they wait instead of computing.

``python -m benchmarks.compare.servers`` prints the requests per second. Each server answers 16 requests at the same
time, each after 0.2 s, as an engine with a full batch does.
"""

import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.types import SamplingParams
from tests.extras.servers.stub_server import valid_server
from tests.rollout.engines import setup_of, source_of

_ROUTE = "/inference/v1/generate"
_SLOTS, _SECONDS, _REQUESTS, _ROUNDS = 16, 0.2, 240, 5
_PROMPTS = [[4 + number % 90] * 40 for number in range(_REQUESTS // 8) for _ in range(8)]  # groups of eight


def waiting_server(folder: Path) -> Any:
    """Return a server that answers a limited number of requests at the same time."""
    server = valid_server(folder)
    answer, slots = server.answers[_ROUTE], threading.Semaphore(_SLOTS)

    def answer_later(body: Any) -> Any:
        with slots:
            time.sleep(_SECONDS)
        return answer(body)

    server.answers[_ROUTE] = answer_later
    return server


def requests_per_second(count: int, kills: bool = False) -> float:
    """Return the median over some rounds.

    Args:
        count: number of servers.
        kills: whether the last server breaks all connections in the middle of each round, until its end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        servers = [waiting_server(folder / str(number)) for number in range(count)]
        engine = VLLMServerEngine([server.url for server in servers], max_restarts=99)
        engine.start(setup_of(source_of(), folder / "ours"))
        engine.wait()
        rates = []
        for version in range(_ROUNDS):
            servers[-1].breaks = False
            engine.update_weights([("w", torch.ones(2))], version)
            while not all(member.is_used for member in engine._running.members):
                time.sleep(0.1)
            began = time.perf_counter()
            if kills:
                threading.Timer(
                    _REQUESTS / _SLOTS / count * _SECONDS / 2, setattr, (servers[-1], "breaks", True)
                ).start()
            completions = generate(engine, _PROMPTS, SamplingParams(4), range(_REQUESTS))
            rates.append(_REQUESTS / (time.perf_counter() - began))
            assert [completion.token_ids for completion in completions] == [prompt[:4] for prompt in _PROMPTS]
        servers[-1].breaks = False
        engine.close()
        for server in servers:
            server.close()
    return statistics.median(rates)


if __name__ == "__main__":
    one = requests_per_second(1)
    for label, rate in (
        ("one server", one),
        ("two servers", requests_per_second(2)),
        ("four servers", requests_per_second(4)),
        ("two servers, one killed in the middle of each round", requests_per_second(2, kills=True)),
    ):
        print(f"{label}: {rate:.0f} requests per second, {rate / one:.2f} times one server")
