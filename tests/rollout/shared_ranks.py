"""Functions of two ranks that share one fake engine, run by :func:`tests.distributed.launch.run_ranks`."""

import os
import socket
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import Environment, EnvironmentSettings, Reply
from lightning_rlhf.environments.bridges import PlainBridge
from lightning_rlhf.expected_errors import EngineDied
from lightning_rlhf.rollout.conversations import ConversationRequest, ConversationSampler
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine, finished
from lightning_rlhf.rollout.generation import CompletionCheck, generate, serve, submit
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.types import Completion, Prompt, SamplingParams

SAMPLING = SamplingParams(8)


class FakeEngine(RolloutEngine):
    """An engine whose completions are the prompt and the seed; raises ``fault`` if it is set."""

    def __init__(self):
        self.calls, self.fault, self.setup, self.version = [], None, None, -1

    def _note(self, call):
        self.calls.append(call)
        if self.fault is not None:
            raise self.fault

    def start(self, setup):
        self._note("start")
        self.setup = setup

    def wait(self):
        self._note("wait")
        return "a stand-in"

    def update_weights(self, parameters, version):
        self._note("update")
        for _, tensor in parameters:
            if tensor.isnan().any():
                raise RuntimeError("NaN is not a weight")
        self.version = version

    def request(self, prompts, sampling, seeds):
        self._note([list(prompt) for prompt in prompts])
        rows = zip(prompts, seeds, strict=True)
        return finished(
            Completion([*prompt, seed], [-1.0] * (len(prompt) + 1), "stop", self.version) for prompt, seed in rows
        )

    def first_difference(self, parameters):
        self._note("difference")
        return next(name for name, _ in parameters)

    def close(self):
        self._note("close")


class Parameters:
    """Iterates over three parameters and counts how many were taken."""

    def __init__(self, value=0.0):
        self.taken, self._value = 0, value

    def __iter__(self):
        for number in range(3):
            self.taken += 1
            yield f"w{number}", torch.full((2,), self._value)


def joined():
    dist.init_process_group("gloo")
    return dist.get_rank()


def started(rank, ranks=2):
    fake_engine = FakeEngine()
    engine = SharedEngine(fake_engine, ranks)
    engine.start(EngineSetup(Path("model"), "float32", 10, Path("log"), devices=(str(4 + rank),), threads=3))
    return engine, fake_engine


def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def submitted(engine, rank):
    """Return two generations with a push in between, and the error of different sampling on the ranks."""
    first = submit(engine, [[7 + rank]], SAMPLING, [1])
    engine.update_weights(Parameters(), 8)
    second = submit(engine, [[5]], SAMPLING, [2])
    wrong = submit(engine, [[5]], SamplingParams(8 + rank), [2])
    results = [(item.result()[0].token_ids, item.result()[0].policy_version) for item in (first, second)]
    return [*results, error_of(wrong.result), engine.traits.overlaps]


def share():
    """Return the results of all operations that succeed."""
    rank = joined()
    engine, fake_engine = started(rank)
    result = {"ready": engine.wait(), "devices": fake_engine.setup and fake_engine.setup.devices}
    result["threads"] = fake_engine.setup and fake_engine.setup.threads
    parameters = Parameters()
    engine.update_weights(parameters, 7)
    result["taken"] = parameters.taken
    mine = [[10 * rank + 1], [10 * rank + 2] * 3][: 2 - rank]
    result["own"] = [(c.token_ids, c.policy_version) for c in generate(engine, mine, SAMPLING, range(len(mine)))]
    result["same"] = [c.token_ids for c in generate(engine, [[5], [6]], SAMPLING, [8, 9])]
    result["other_seeds"] = [c.token_ids for c in generate(engine, [[5]], SAMPLING, [rank])]
    result["one_has_none"] = [c.token_ids for c in generate(engine, [[5]] * rank, SAMPLING, [3] * rank)]
    result["submitted"] = submitted(engine, rank)
    parameters = Parameters()
    result["difference"], result["compared"] = engine.first_difference(parameters), parameters.taken
    engine.close()
    result["calls"] = fake_engine.calls
    dist.destroy_process_group()
    return result


def fail():
    """Return the errors on each rank if the engine of the first rank fails, and if the ranks are inconsistent."""
    rank = joined()
    engine, fake_engine = started(rank)
    message, parameters = {}, Parameters(float("nan"))
    message["update"], message["taken"] = error_of(lambda: engine.update_weights(parameters, 1)), parameters.taken
    message["sampling"] = error_of(lambda: generate(engine, [[1]], SamplingParams(8 + rank), [0]))
    for fault in (EngineDied("it burnt down"), ValueError("no such thing"), ZeroDivisionError("by zero")):
        fake_engine.fault = fault
        name = type(fault).__name__
        message[f"generate {name}"] = error_of(lambda: generate(engine, [[1]], SAMPLING, [0]))
        message[f"wait {name}"] = error_of(engine.wait)
        message[f"difference {name}"] = error_of(lambda: engine.first_difference(Parameters()))
    fake_engine.fault = None
    message["lives on"] = error_of(lambda: generate(engine, [[1]], SAMPLING, [0]))
    message["three"] = error_of(lambda: started(rank, ranks=3))
    hosts = ("a", "b")
    socket.gethostname = lambda: hosts[rank]
    message["hosts"] = error_of(lambda: started(rank))
    dist.destroy_process_group()
    return message


def lose():
    """End one rank during a rollout; write the error of the other rank and the time until it was raised."""
    rank = joined()
    engine, _ = started(rank)
    began = time.monotonic()
    if rank == 1:
        Path(os.environ["ERROR_FILE"]).with_suffix(".gone").write_text("")
        os._exit(0)
    message = error_of(lambda: generate(engine, [[1]], SAMPLING, [0]))
    Path(os.environ["ERROR_FILE"]).write_text(f"{time.monotonic() - began} {message}")
    os._exit(0)


def converse():
    """Return conversations of different length and number on two ranks, and of equal requests on both."""
    rank = joined()
    engine, fake_engine = started(rank)
    engine.update_weights(Parameters(), 7)
    settings = EnvironmentSettings(Counts, bridge="plain", max_turns=4, timeout_s=None)
    tokenizer = CharacterTokenizer("abcdefgh").load()
    sampler = ConversationSampler(settings, PlainBridge(tokenizer), tokenizer)
    check = CompletionCheck(99, 7, 99)

    def requested(number, turns):
        sampling = SamplingParams(40, stop_token_ids=(2,))
        return ConversationRequest(Prompt([number], "", {"turns": turns}), 0, (4, 5, 6, 7), sampling)

    def run(requests):
        result = serve(engine, requests, partial(sampler, check=check)).result()
        return [(len(item.conversation.turn_ends), item.token_ids, item.policy_version) for item in result]

    different = [requested(4, 1), requested(5, 3)] if rank == 0 else [requested(6, 2)]
    results = {"different": run(different), "same": run([requested(8, 2)]), "none": run([requested(9, 1)] * rank)}
    sampler.close()
    results["calls"] = len([call for call in fake_engine.calls if isinstance(call, list)])
    engine.close()
    dist.destroy_process_group()
    return results


class Counts(Environment):
    """Ends after the number of turns given in its row."""

    def reset(self, row):
        self.turns = row["turns"]

    def step(self, turn):
        return Reply("a", done=turn.number + 1 == self.turns)
