"""Validation samples with its own temperature, limits and length; training keeps its own."""

import jsonargparse
import pytest

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.callbacks.loop.rollout_settings import ValidationSamples
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import SamplingLimits
from tests.callbacks.conftest import ROWS
from tests.environments import worlds
from tests.stand_ins import ScriptedEngine

CHOSEN = {"number": 2, "temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "max_response_tokens": 7}


class Listening(TransformersEngine):
    """Keeps the number of requests and their parameters."""

    def __init__(self):
        super().__init__()
        self.requested = []

    def start(self, setup):
        self.setup = setup
        super().start(setup)

    def request(self, prompts, sampling, seeds):
        self.requested.append((len(prompts), sampling[0]))
        return super().request(prompts, sampling, seeds)


def test_validation_has_its_own_sampling(run):
    engine = Listening()
    done = run(
        loop={"engine": engine, "val_samples": ValidationSamples(**CHOSEN), "temperature": 1.2, "group_size": 3},
        data={"val": InMemory(ROWS)},
    ).fit()
    limits = SamplingLimits(0.9, 5, 0.01)
    kinds = {(count, each.temperature, each.limits, each.max_tokens) for count, each in engine.requested}
    assert kinds == {(2, 0.0, SamplingLimits(), 7), (4, 0.6, limits, 7), (6, 1.2, SamplingLimits(), 4)}
    assert engine.setup.max_tokens == 8 + 7  # prompt and response
    assert "val/pass@2" in done.metrics


def test_samples_with_one_possible_token_are_the_greedy_response(run):
    loop = {"engine": TransformersEngine(), "val_samples": ValidationSamples(3, top_k=1), "rewards": [len_of]}
    done = run(loop=loop, data={"val": InMemory(ROWS)}).fit()
    assert done.metrics["val/len_of_sampled"] == done.metrics["val/len_of_greedy"]
    assert done.metrics["val/len_of_sampled_std"] == 0


def len_of(completions):
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("name", ["temperature", "limits"])
def test_log_probs_of_its_samples_are_compared_at_its_own_temperature_and_limits(run, name):
    chosen = ValidationSamples(2, temperature=0.5) if name == "temperature" else ValidationSamples(2, top_k=3)
    loop = {"engine": TransformersEngine(), "val_samples": chosen, "max_staleness": 2, "max_logprob_diff": 1e-4}
    run(loop=loop, data={"val": InMemory(ROWS)}, model={"correction": RolloutCorrection(level="token")}).fit()


def test_configurations_give_a_number_or_all_of_it():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutLoop, "loop", skip={"rewards"})
    parsed = parser.instantiate(parser.parse_object({"loop": {"val_samples": {"number": 3, "top_p": 0.9}}}))
    assert parsed.loop.val_sampling == ValidationSamples(3, top_p=0.9)
    parsed = parser.instantiate(parser.parse_object({"loop": {"val_samples": 3}}))
    assert parsed.loop.val_sampling == ValidationSamples(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 0}, "number must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"max_response_tokens": 0}, "max_response_tokens must be at least 1"),
    ],
)
def test_invalid_samples_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        ValidationSamples(**changes)


def test_other_lengths_of_conversations_and_of_short_models_are_rejected(run):
    environment = EnvironmentSettings(worlds.Echo, bridge="plain", max_turns=2)
    loop = {"environment": environment, "rewards": [], "val_samples": ValidationSamples(max_response_tokens=9)}
    with pytest.raises(UsageError, match="val_samples has max_response_tokens 9, but conversations"):
        run(loop=loop).fit()
    with pytest.raises(UsageError, match="64"):
        run(loop={"val_samples": ValidationSamples(max_response_tokens=100)}).fit()


def test_a_trial_run_is_as_short_as_before(run):
    made = run(loop={"val_samples": ValidationSamples(2, max_response_tokens=40)}, trainer={"fast_dev_run": 1})
    assert isinstance(made.engine, ScriptedEngine)
    lengths = []
    generate = made.engine.generate
    made.engine.generate = lambda prompts, sampling, seeds: (
        lengths.append(sampling.max_tokens) or generate(prompts, sampling, seeds)
    )
    made.fit()
    assert set(lengths) == {4}
    assert made.loop.val_sampling.max_response_tokens == 40  # of a later run with this callback
