"""Generation with transformers: samples follow the model's distribution, depend only on the seed, and have correct
log-probabilities."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_rlhf.functional.allowed_tokens import allowed_tokens
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.transformers import SeededSampler, TransformersEngine
from lightning_rlhf.types import SamplingLimits, SamplingParams
from tests.rollout.engines import (
    ARCHITECTURE,
    END,
    greedy,
    largest_gap,
    parameters_of,
    prompts_of,
    pushed,
    setup_of,
    source_of,
)


@pytest.fixture
def engine(tmp_path):
    engine = TransformersEngine(batch_size=16)
    engine.start(setup_of(source_of(), tmp_path))
    yield engine
    engine.close()


def draws(logits, sampling, count):
    """Return tokens and log-probabilities of one draw per seed from the same logits."""
    sampler = SeededSampler(sampling, range(count))
    chosen = sampler(torch.zeros(count, 1, dtype=torch.long), logits.expand(count, -1)).argmax(dim=1)
    return chosen, sampler.logprobs[0]


def distance(chosen, probabilities):
    """Return Pearson's chi-square statistic."""
    expected = probabilities * len(chosen)
    result = torch.bincount(chosen, minlength=len(probabilities))
    assert not result[probabilities == 0].any()
    return ((result - expected) ** 2 / expected)[probabilities > 0].sum().item()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_samples_follow_the_distribution(temperature):
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0, -torch.inf, 0.5])
    probabilities = (logits / temperature).softmax(0)
    chosen, logprobs = draws(logits, SamplingParams(1, temperature), 20_000)
    assert distance(chosen, probabilities) < 18.47  # chi-square with 4 degrees of freedom exceeds it once in 1000
    torch.testing.assert_close(logprobs, probabilities.log()[chosen])


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"top_k": 2}, [0, 3]),
        ({"top_k": 100}, [0, 1, 2, 3, 5]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.8}, [0, 3, 5]),
        ({"top_k": 3, "top_p": 0.5}, [0]),
        ({"min_p": 0.3}, [0, 3]),
    ],
)
def test_limits_truncate_the_distribution(options, saved):
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0, -torch.inf, 0.5])  # 0.53 0.03 0.07 0.20 0 0.12... of the whole
    wanted = torch.full_like(logits, -torch.inf)
    wanted[saved] = logits[saved]
    probabilities = wanted.softmax(0)
    chosen, logprobs = draws(logits, SamplingParams(1, limits=SamplingLimits(**options)), 10_000)
    assert distance(chosen, probabilities) < 18.47
    torch.testing.assert_close(logprobs, probabilities.log()[chosen])


def test_draws_of_one_row_are_independent():
    """Consecutive tokens of one generator are independent: the probability of every pair is the product."""
    logits = torch.tensor([[0.0, 1.0]])
    sampler = SeededSampler(SamplingParams(1), [7])
    tokens = torch.stack([sampler(torch.zeros(1, 1, dtype=torch.long), logits).argmax(dim=1) for _ in range(10_000)])
    single = logits[0].softmax(0)
    pairs = tokens[0::2, 0] * 2 + tokens[1::2, 0]
    assert distance(pairs, torch.outer(single, single).flatten()) < 16.27  # 3 degrees of freedom


def test_temperature_0_takes_the_most_likely_token_and_returns_the_log_probability_of_the_model():
    logits = torch.tensor([0.0, 3.0, 1.0])
    chosen, logprobs = draws(logits, SamplingParams(1, temperature=0, limits=SamplingLimits(top_k=2)), 3)
    assert chosen.tolist() == [1, 1, 1]
    torch.testing.assert_close(logprobs, logits.log_softmax(0)[1].expand(3))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_the_trainer_after_every_push_for_prompts_of_different_length(engine, temperature):
    prompts = prompts_of(24)
    for version in range(3):
        actor = pushed(engine, source_of(seed=version), version)
        completions = generate(engine, prompts, SamplingParams(24, temperature, stop_token_ids=(END,)), range(24))
        assert largest_gap(actor, prompts, completions, temperature) * temperature < 1e-5
        assert {completion.policy_version for completion in completions} == {version}
        assert engine.first_difference(parameters_of(actor)) is None


def test_completions_have_the_tokens_that_limits_allowed(engine):
    actor, prompts, limits = pushed(engine, source_of()), prompts_of(24), SamplingLimits(0.9, 20, 0.02)
    parameters = SamplingParams(24, 0.7, limits, stop_token_ids=(END,))
    completions = generate(engine, prompts, parameters, range(24))
    assert any(len(completion.token_ids) < 24 for completion in completions)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids])
        with torch.no_grad():
            logits = actor.lm(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        kept = allowed_tokens(logits, limits)
        assert completion.allowed.counts.tolist() == kept.sum(dim=1).tolist()
        assert completion.allowed.listed()[1].tolist() == kept.nonzero()[:, 1].tolist()
        logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[torch.arange(len(kept)), completion.token_ids]
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, atol=1e-5, rtol=0)


def test_echo_returns_the_prompt_with_its_log_probabilities_first(engine):
    actor, prompts = pushed(engine, source_of(seed=1), 4), prompts_of(8)
    sampling = SamplingParams(3)
    without = generate(engine, prompts, sampling, range(8))
    completions = generate(engine, prompts, replace(sampling, echo=True), range(8))
    for prompt, completion, sampled in zip(prompts, completions, without, strict=True):
        assert completion.token_ids == [*prompt[1:], *sampled.token_ids]
        assert completion.policy_version == 4
    assert largest_gap(actor, [prompt[:1] for prompt in prompts], completions) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"model_type": "qwen2", "tie_word_embeddings": False}, {"model_type": "gpt2"}])
def test_greedy_tokens_are_the_argmax_for_any_padding_before_the_prompt(changes, tmp_path):
    engine = TransformersEngine()
    engine.start(setup_of(source_of(**changes), tmp_path))
    actor, prompts = pushed(engine, source_of(seed=3, **changes)), prompts_of(6)
    completions = generate(engine, prompts, SamplingParams(10, temperature=0), [0] * 6)
    assert [completion.token_ids for completion in completions] == [greedy(actor, prompt, 10) for prompt in prompts]


def test_sample_depends_on_its_seed_and_prompt_and_not_on_its_batch(engine):
    pushed(engine, source_of())
    prompts, seeds = prompts_of(20), list(range(20))
    whole = generate(engine, prompts, SamplingParams(16, stop_token_ids=(END,)), seeds)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = generate(
        engine, [prompts[i] for i in order], SamplingParams(16, stop_token_ids=(END,)), [seeds[i] for i in order]
    )
    alone = [
        generate(engine, [p], SamplingParams(16, stop_token_ids=(END,)), [s])[0]
        for p, s in zip(prompts, seeds, strict=True)
    ]
    for other in ([shuffled[order.index(i)] for i in range(20)], alone):
        assert [completion.token_ids for completion in other] == [completion.token_ids for completion in whole]
    assert generate(engine, prompts, SamplingParams(16, stop_token_ids=(END,)), seeds) == whole
    moved = generate(engine, prompts, SamplingParams(16, stop_token_ids=(END,)), [seed + 20 for seed in seeds])
    assert all(a.token_ids != b.token_ids for a, b in zip(moved, whole, strict=True))


def test_response_ends_only_after_a_stop_token(engine):
    pushed(engine, source_of())
    stops = (END, 17, 23)
    completions = generate(engine, prompts_of(64), SamplingParams(30, stop_token_ids=stops), range(64))
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == set(stops)
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(stops)
        assert completion in ended or len(completion.token_ids) == 30
    # The end token of config.json is a token like any other unless it was asked for.
    free = generate(engine, prompts_of(64), SamplingParams(30), range(64))
    assert any(END in completion.token_ids[:-1] for completion in free)
    assert {(len(completion.token_ids), completion.finish_reason) for completion in free} == {(30, "length")}


def test_response_whose_last_allowed_token_is_a_stop_token_is_complete(engine):
    pushed(engine, source_of())
    (long,) = generate(engine, [[5, 6]], SamplingParams(12), [0])
    fourth = long.token_ids.index(long.token_ids[3])
    stopped = generate(engine, [[5, 6]], SamplingParams(fourth + 1, stop_token_ids=(long.token_ids[3],)), [0])[0]
    assert (stopped.token_ids, stopped.finish_reason) == (long.token_ids[: fourth + 1], "stop")


def test_random_state_of_the_trainer_is_not_changed(tmp_path):
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    engine, actor = TransformersEngine(), source_of().causal()
    engine.start(setup_of(source_of(), tmp_path))
    engine.update_weights(parameters_of(actor), 0)
    generate(engine, [[5, 6]], SamplingParams(8), [1])
    assert state() == before
    assert "transformers" in engine.wait()


def test_engine_keeps_a_separate_copy_of_the_weights(engine):
    actor = pushed(engine, source_of())
    with torch.no_grad():
        actor.lm.model.layers[1].mlp.up_proj.weight[3, 4] += 1
    assert engine.first_difference(parameters_of(actor)) == "model.layers.1.mlp.up_proj.weight"


def test_incomplete_push_is_rejected(engine):
    parameters = list(parameters_of(source_of().causal()))
    with pytest.raises(RuntimeError, match=r"the push contained no weights for \['model.norm.weight'\]"):
        engine.update_weights(parameters[:-1], 0)


def test_bfloat16_weights_stay_bfloat16(tmp_path):
    engine, source = TransformersEngine(), source_of()
    source = type(source)(source.architecture, seed=0, dtype="bfloat16")
    engine.start(setup_of(source, tmp_path))
    actor = pushed(engine, source)
    assert engine.first_difference(parameters_of(actor)) is None
    completions = generate(engine, [[5, 6]] * 4, SamplingParams(8), range(4))
    assert largest_gap(actor, [[5, 6]] * 4, completions) < 0.1


@pytest.mark.parametrize("float32_logits", [True, False])
def test_logits_of_engine_and_actor_are_rounded_alike(tmp_path, float32_logits):
    """Peaked distributions, whose log-probs are 0.01 nats and more off where one of the two rounds its logits."""
    architecture = {**ARCHITECTURE, "initializer_range": 0.5}
    source = FromConfig(architecture, seed=0, dtype="bfloat16", float32_logits=float32_logits)
    engine = TransformersEngine()
    engine.start(setup_of(source, tmp_path))
    actor, prompts = pushed(engine, source), [[first, 3, 60 - first] for first in range(3, 51)]  # nothing is padded
    completions = generate(engine, prompts, SamplingParams(1), range(48))
    gap = largest_gap(actor, prompts, completions)
    actor.float32_logits = not float32_logits
    assert gap < largest_gap(actor, prompts, completions) / 2


def test_directory_of_a_saved_model_has_float32_logits(tmp_path):
    source = FromConfig(ARCHITECTURE, seed=0, dtype="bfloat16")
    source.causal().save_pretrained(tmp_path)
    engine = TransformersEngine()
    engine.start(EngineSetup(tmp_path, "bfloat16", 64, tmp_path / "engine.log"))
    actor, prompts = pushed(engine, source), [[first, 3, 60 - first] for first in range(3, 51)]
    assert largest_gap(actor, prompts, generate(engine, prompts, SamplingParams(1), range(48))) < 1e-5


def test_engine_can_be_restarted_and_closed_twice(engine, tmp_path):
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="not running"):
        generate(engine, [[5]], SamplingParams(1), [0])
    engine.start(setup_of(source_of(), tmp_path))
    pushed(engine, source_of())
    assert generate(engine, [[5]], SamplingParams(3), [0])


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        TransformersEngine(batch_size=0)
