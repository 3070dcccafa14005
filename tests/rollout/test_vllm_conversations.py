"""Conversations with vLLM: bitwise equal in any order, with a busy engine."""

import time
from dataclasses import replace
from functools import partial

import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import Environment, EnvironmentSettings
from lightning_rlhf.environments.bridges import PlainBridge
from lightning_rlhf.expected_errors import EngineDied
from lightning_rlhf.rollout.conversations import ConversationRequest, ConversationSampler
from lightning_rlhf.rollout.engine import EngineTraits
from lightning_rlhf.rollout.generation import CompletionCheck, serve
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import Prompt, SamplingParams
from tests.environments import worlds
from tests.rollout.engines import ARCHITECTURE, END, largest_gap, prompts_of, pushed, setup_of, source_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOKENIZER = CharacterTokenizer("".join(chr(number) for number in range(65, 122))).load()  # 61 tokens


def requests(count, turns=4, max_tokens=120):
    sampling = SamplingParams(max_tokens, stop_token_ids=(END,))
    return [
        ConversationRequest(
            Prompt(prompt, ""),
            seed=i // 4,  # the environment differs between groups
            turn_seeds=tuple(range(100 * i, 100 * i + turns)),
            sampling=sampling,
        )
        for i, prompt in enumerate(prompts_of(count))
    ]


def converse(engine, requested, version=0, on_finished=None, **settings):
    defaults = {"factory": worlds.Echo, "bridge": "plain", "max_turns": 4, "max_turn_tokens": 24, "timeout_s": None}
    environment = EnvironmentSettings(**{**defaults, **settings})
    sampler = ConversationSampler(environment, PlainBridge(TOKENIZER), TOKENIZER)
    check = CompletionCheck(120, version, ARCHITECTURE["vocab_size"])
    try:
        return serve(engine, requested, partial(sampler, check=check), on_finished).result()
    finally:
        sampler.close()


class Lockstep:
    """An engine whose requests wait for the turns of all conversations."""

    traits = EngineTraits(overlaps=False)
    group = None

    def __init__(self, engine):
        self.request = engine.request


def test_conversations_are_bitwise_equal_in_lockstep_continuous_reversed_and_limited(engines):
    engine = engines.tied  # the session's engine of a model with tied embeddings
    actor = pushed(engine, source_of(seed=1))
    requested = requests(16)
    expected = converse(engine, requested)
    runs = {
        "again": converse(engine, requested),
        "lockstep": converse(Lockstep(engine), requested),
        "reversed": converse(engine, requested[::-1])[::-1],
        "one call at a time": converse(engine, requested, concurrency=1),
        "alone": [converse(engine, [item])[0] for item in requested[:4]],
        "in an event loop": converse(engine, requested, factory=worlds.SlowEcho),
    }
    for name, result in runs.items():
        for entry, other in zip(result, expected, strict=name != "alone"):
            assert (entry.token_ids, entry.logprobs, entry.sampled) == (
                other.token_ids,
                other.logprobs,
                other.sampled,
            ), name
    turns = [len(item.conversation.turn_ends) for item in expected]
    assert max(turns) > 1
    assert any(False in item.sampled for item in expected)
    for item in expected:
        written = [value for value, sampled in zip(item.logprobs, item.sampled, strict=True) if not sampled]
        assert set(written) <= {0.0}
    assert largest_gap_of_sampled(actor, requested, expected) < 1e-5


def largest_gap_of_sampled(actor, requested, completions):
    """Return the difference of log-probabilities on sampled tokens; each turn is a response to all tokens before it."""
    prompts, parts = [], []
    for request, completion in zip(requested, completions, strict=True):
        first = 0
        for end in completion.conversation.turn_ends:
            start = first + completion.sampled[first:end].count(False)
            prompts.append([*request.prompt.token_ids, *completion.token_ids[:start]])
            part = slice(start, end)
            parts.append(
                replace(
                    completion, token_ids=completion.token_ids[part], logprobs=completion.logprobs[part], sampled=None
                )
            )
            first = end
    return largest_gap(actor, prompts, parts)


def test_conversations_are_passed_on_as_they_end(engines):
    pushed(engines.tied, source_of(seed=1))
    order = []
    completions = converse(engines.tied, requests(8), on_finished=lambda index, _: order.append(index))
    assert sorted(order) == list(range(8))
    assert len(completions) == 8


class Waits(Environment):
    """Answers after 50 ms."""

    def step(self, text):
        time.sleep(0.05)
        return text[:2]


@pytest.mark.slow
def test_engine_is_busy_while_environments_wait(engines):
    """64 conversations of 8 turns with 50 ms per call: at most 15 % of the turns leave the engine without a request."""
    engine = engines.tied
    pushed(engine, source_of(seed=1))
    busy = _Busy(engine)
    requested = [
        replace(request, turn_seeds=tuple(range(1000 * i, 1000 * i + 8))) for i, request in enumerate(requests(64))
    ]
    result = converse(busy, requested, factory=Waits, concurrency=64, max_turns=8, max_turn_tokens=12)
    turns = sum(len(item.conversation.turn_ends) for item in result)
    assert turns > 64
    assert busy.ended == turns
    assert busy.pauses <= 0.15 * turns


class _Busy:
    """Counts the turns of an engine and the times at which it has no request."""

    traits = EngineTraits(overlaps=True)
    group = None

    def __init__(self, engine):
        self.engine, self.running, self.ended, self.pauses = engine, 0, 0, 0

    def _end(self, _):
        self.running -= 1
        self.ended += 1
        self.pauses += self.running == 0

    def request(self, *arguments):
        futures = self.engine.request(*arguments)
        self.running += len(futures)
        for future in futures:
            future.add_done_callback(self._end)
        return futures


@pytest.mark.slow
def test_death_of_the_engine_ends_the_conversations(tmp_path):
    engine = VLLMEngine(max_restarts=0)
    engine.start(setup_of(source_of(), tmp_path))
    try:
        pushed(engine, source_of())
        engine._running.process.kill()
        with pytest.raises(EngineDied, match="killed by signal 9"):
            converse(engine, requests(8))
    finally:
        engine.close()
