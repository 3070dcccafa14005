"""Generation in the background: weights pushed in the meantime, errors, and callbacks."""

import threading
import time
from concurrent.futures import Future

import pytest

from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.rollout.generation import CompletionCheck, PendingCompletions, generate, submit
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMAdapterEngine, VLLMEngine
from lightning_rlhf.types import Completion, SamplingParams
from tests.rollout.engines import END, largest_gap, parameters_of, prompts_of, pushed, setup_of, source_of
from tests.rollout.in_process import InProcessVLLMEngine

vllm = pytest.mark.vllm
SAMPLING = SamplingParams(150, stop_token_ids=(END,))
PROMPTS = prompts_of(24)


# -- generations and versions -------------------------------------------------------------------------------------


def test_generation_waits_only_once():
    waits = []
    generation = PendingCompletions(lambda: waits.append(1) or [Completion([1], [-1.0], "stop", 0)])
    assert generation.finished_at is None
    assert generation.result() is generation.result()
    assert len(waits) == 1
    assert generation.finished_at >= generation.requested_at


def test_engine_in_the_trainer_process_generates_immediately(tmp_path):
    engine = TransformersEngine()
    engine.start(setup_of(source_of(), tmp_path))
    pushed(engine, source_of(seed=1), version=1)
    expected = generate(engine, PROMPTS[:4], SAMPLING, range(4))
    finished = []
    generation = submit(engine, PROMPTS[:4], SAMPLING, range(4), lambda *result: finished.append(result))
    pushed(engine, source_of(seed=2), version=2)
    assert generation.result() == expected
    assert finished == list(enumerate(expected))
    assert not engine.traits.overlaps


@pytest.mark.parametrize(
    ("later", "versions"),
    [((), [3, 3, 3, 3]), (((2, 5),), [3, 3, 5, 5]), (((1, 4), (2, 5)), [3, 4, 5, 5])],
)
def test_each_token_has_a_version(later, versions):
    assert Completion([7] * 4, [-1.0] * 4, "stop", 3, later).token_versions == versions


def test_tokens_of_later_versions_are_valid_only_if_the_engine_mixes_versions():
    mixed = Completion([1, 2], [-1.0] * 2, "stop", 3, ((1, 4),))
    CompletionCheck(2, 3, 9, allows_newer=True).check_one(mixed)
    with pytest.raises(RunError, match="policy version"):
        CompletionCheck(2, 3, 9).check_one(mixed)
    with pytest.raises(RunError, match="policy version"):
        CompletionCheck(2, 4, 9, allows_newer=True).check_one(mixed)


class ManyThreads(TransformersEngine):
    """Finishes all completions at the same time, each in a separate thread."""

    def request(self, prompts, sampling, seeds):
        futures, begin = [Future() for _ in prompts], threading.Barrier(len(prompts))

        def finish(future):
            begin.wait()
            future.set_result(Completion([1], [0.0], "stop", 0))

        for future in futures:
            threading.Thread(target=finish, args=[future]).start()
        return futures


def test_finished_completions_are_passed_on_one_at_a_time():
    running, most = [], []

    def on_finished(index, completion):
        running.append(index)
        most.append(len(running))
        time.sleep(0.01)
        running.remove(index)

    generate(ManyThreads(), PROMPTS[:8], SAMPLING, range(8), on_finished)
    assert most == [1] * 8


# -- vLLM ---------------------------------------------------------------------------------------------------------


@vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_push_waits_for_earlier_responses(engines):
    engine = engines.tied
    first = pushed(engine, source_of(seed=1), version=1)
    expected = generate(engine, PROMPTS, SAMPLING, range(24))
    generation = submit(engine, PROMPTS, SAMPLING, range(24))
    second = pushed(engine, source_of(seed=2), version=2)  # returns while the engine generates
    later = submit(engine, PROMPTS, SAMPLING, range(24))
    assert generation.result() == expected
    assert largest_gap(first, PROMPTS, expected) < 1e-5
    assert {completion.policy_version for completion in later.result()} == {2}
    assert largest_gap(second, PROMPTS, later.result()) < 1e-5


@pytest.mark.slow
@vllm
@pytest.mark.timeout(600)
def test_completions_are_passed_on_before_all_are_finished(engines):
    pushed(engines.tied, source_of())
    calls, times = {}, []

    def on_finished(index, completion):
        calls[index] = completion
        times.append(time.perf_counter())
        time.sleep(0.001)

    generation = submit(engines.tied, PROMPTS, SAMPLING, range(24), on_finished)
    completions = generation.result()
    assert [calls[index] for index in range(24)] == completions
    assert generation.requested_at < times[0] < generation.finished_at  # the first is passed on before the last exists


@vllm
@pytest.mark.timeout(600)
def test_error_of_the_callback_is_raised_when_the_completions_are_read(engines):
    pushed(engines.tied, source_of())

    def fail(index, completion):
        raise RunError(f"no {index}")

    with pytest.raises(RunError, match="no 0"):
        submit(engines.tied, PROMPTS[:2], SAMPLING, range(2), fail).result()
    assert generate(engines.tied, PROMPTS[:1], SAMPLING, [0])


@pytest.mark.slow
@vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("unfinished", ["continue", "cut"])
def test_unfinished_responses_continue_or_end_when_weights_are_pushed(tmp_path, unfinished):
    engine = VLLMEngine(unfinished=unfinished)
    assert engine.traits.mixes_versions
    engine.start(setup_of(source_of(), tmp_path))
    try:
        first = pushed(engine, source_of(seed=1), version=1)
        longest = SamplingParams(150)  # without a stop token
        whole = generate(engine, PROMPTS, longest, range(24))
        second = source_of(seed=2).causal().eval()
        generation = submit(engine, PROMPTS, longest, range(24))
        generate(engine, PROMPTS[:1], SamplingParams(5), [24])  # after 5 of the 150 tokens of the others
        engine.update_weights(parameters_of(second), 2)
        mixed = generation.result()
        after = generate(engine, PROMPTS, SAMPLING, range(24))
    finally:
        engine.close()
    assert largest_gap(second, PROMPTS, after) < 1e-5  # the prefix cache of the old weights is not used
    assert all(completion.finish_reason == "length" for completion in mixed)
    for completion, other in zip(mixed, whole, strict=True):
        versions = completion.token_versions
        assert versions == sorted(versions)
        old = versions.count(1)
        assert completion.token_ids[:old] == other.token_ids[:old]
        assert completion.logprobs[:old] == other.logprobs[:old]
    if unfinished == "cut":
        started = [completion for completion in mixed if 1 in completion.token_versions]
        assert started
        assert all(len(item.token_ids) < 150 and set(item.token_versions) == {1} for item in started)
        assert largest_gap(first, PROMPTS[: len(started)], mixed[: len(started)]) < 1e-5
    else:
        assert all(len(completion.token_ids) == 150 for completion in mixed)
        assert any(set(completion.token_versions) == {1, 2} for completion in mixed)
        assert largest_gap(first, PROMPTS, mixed) > 1e-2


@vllm
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_death_of_the_engine_is_raised_when_the_completions_are_read(tmp_path):
    engine = VLLMEngine(max_restarts=0)
    engine.start(setup_of(source_of(), tmp_path))
    try:
        pushed(engine, source_of())
        generation = submit(engine, PROMPTS, SamplingParams(150), range(24))
        engine._running.process.kill()
        with pytest.raises(EngineDied, match="killed by signal 9"):
            generation.result()
    finally:
        engine.close()


@vllm
def test_overlap_of_each_engine():
    assert VLLMEngine().traits.overlaps
    assert VLLMAdapterEngine().traits.overlaps
    assert not InProcessVLLMEngine().traits.overlaps
    assert not VLLMEngine().traits.mixes_versions


@vllm
def test_unknown_option_for_unfinished_responses_raises():
    with pytest.raises(ValueError, match="unfinished must be finish, continue or cut, got 'stop'"):
        VLLMEngine(unfinished="stop")
