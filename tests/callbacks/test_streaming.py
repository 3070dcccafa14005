"""A run is the same whether or not its engine reports completions as they finish."""

import random
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.rewards.function import RewardFunction
from tests.callbacks.conftest import ROWS, exact
from tests.callbacks.test_rollout_loop import Listening

DRAW = random.Random(0)


class Unordered(Listening):
    """Finishes its completions in random order."""

    seconds = 0.0

    def request(self, prompts, sampling, seeds):
        completions = [future.result() for future in super().request(prompts, sampling, seeds)]
        futures = [Future() for _ in completions]

        def finish():
            for number in DRAW.sample(range(len(prompts)), len(prompts)):
                time.sleep(self.seconds)
                futures[number].set_result(completions[number])

        threading.Thread(target=finish).start()
        return futures


def letters(solution_str, ground_truth):
    return {"score": len(set(solution_str)) + 0.25 * (solution_str == ground_truth), "length": len(solution_str)}


def several(completions, answer):
    (text,), (right,) = completions, answer
    return [float(text < right)]


several.per_sample = True


@pytest.mark.slow
@pytest.mark.parametrize("validates", [False, True])
def test_run_is_the_same_with_and_without_streaming(run, validates):
    result = []
    for engine in (Listening(), Unordered(), Unordered()):
        rewards = [RewardFunction(exact), RewardFunction(letters), RewardFunction(several, weight=0.5)]
        loop = {"rewards": rewards, "engine": engine, "group_size": 2, "val_samples": 3, "val_metric": "letters"}
        data = {"val": InMemory(ROWS)} if validates else {}
        made = run(loop=loop, data=data, model={"minibatch_size": 4}, trainer={"max_epochs": 2}).fit()
        weights = [parameter.detach().clone() for parameter in made.module.parameters()]
        clocks = ("time/", "perf/", "rollout/tokens_per_s")
        metrics = {name: value for name, value in made.metrics.items() if not name.startswith(clocks)}
        result.append((weights, metrics, made.loop.validation_samples))
    for weights, metrics, samples in result[1:]:
        assert all(torch.equal(one, other) for one, other in zip(weights, result[0][0], strict=True))
        assert metrics == result[0][1]
        assert samples == result[0][2]
    assert result[0][1]["reward_letters/length"] > 0
    assert bool(result[0][2]) == validates


class Slow(Unordered):
    """Takes half a second for each completion."""

    seconds = 0.5


@pytest.mark.slow
def test_reward_time_is_the_wait_after_the_last_response(run):
    def slow(solution_str):
        time.sleep(0.4)
        return 0.0

    rewards = [RewardFunction(slow, dry_call=False)]
    made = run(loop={"rewards": rewards, "engine": Slow(), "validate_at_ends": False}, data={"batch_size": 4},
               model={"minibatch_size": 4}).fit()  # fmt: skip
    assert 1.9 < made.metrics["time/generate_s"] < 4
    assert 0.3 < made.metrics["time/reward_s"] < 1.2
