"""Engines with the program that vLLM runs on a GPU: right log-probabilities, versions and seeds.

Asynchronous scheduling has a step in flight while the engine gets new weights or a response ends, and Model Runner V2
samples in kernels of its own. Not run: the kernel of top-p and top-k, which Triton's interpreter does not support (the
function for CPUs takes its place), tensor parallelism, CUDA graphs, images, and any GPU.
"""

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf.extras.router_replay.routers import ForcedRouters
from lightning_rlhf.functional.allowed_tokens import allowed_tokens
from lightning_rlhf.models.causal import hidden_states
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.models.lora import LoRA, is_adapter
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.rollout.generation import generate, submit
from lightning_rlhf.rollout.vllm.engine import VLLMAdapterEngine, VLLMEngine
from lightning_rlhf.types import RoutedExperts, SamplingLimits, SamplingParams
from tests.callbacks.conftest import Run
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
from tests.rollout.test_vllm_adapters import adapted, base_of, exported, named_tensors
from tests.rollout.test_vllm_conversations import converse, largest_gap_of_sampled, requests

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PROMPTS = prompts_of(8, longest=12)
SAMPLING = SamplingParams(10, stop_token_ids=(END,))
NO_STOP = SamplingParams(24)


@pytest.fixture(scope="module")
def engine(program, tmp_path_factory):
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}  # crash the runner V1 on a CPU
    engine = VLLMEngine(arguments=chunks if "V2" in program else None)
    engine.start(setup_of(source_of(), tmp_path_factory.mktemp("engine")))
    yield engine
    engine.close()


@pytest.fixture
def start(program, tmp_path):
    """Start an engine of its own for a test."""
    started = []

    def start(engine, **changes):
        engine.start(replace(setup_of(source_of(), tmp_path), **changes))
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def test_log_probabilities_equal_the_trainer_when_weights_follow_the_last_response_at_once(engine, program):
    assert program in engine.wait()
    for version in range(4):
        actor = pushed(engine, source_of(seed=version), version)
        completions = generate(engine, PROMPTS, SAMPLING, range(8))
        assert largest_gap(actor, PROMPTS, completions) < 1e-5
        assert {completion.policy_version for completion in completions} == {version}
    assert engine.first_difference(parameters_of(actor)) is None


def test_engine_returns_the_tokens_that_limits_allowed(start, program):
    engine = start(VLLMEngine(), limits=SamplingLimits(0.9, 12, 0.01))
    assert program in engine.wait()
    actor = pushed(engine, source_of(seed=1), 1)
    echoed = generate(engine, PROMPTS, SamplingParams(1, echo=True), range(8))
    assert [each.token_ids[:-1] for each in echoed] == [prompt[1:] for prompt in PROMPTS]
    mostly = generate(engine, PROMPTS, SamplingParams(6, temperature=0), range(8))
    assert [each.token_ids for each in mostly] == [greedy(actor, prompt, 6) for prompt in PROMPTS]
    plain = generate(engine, PROMPTS, NO_STOP, range(8))
    assert largest_gap(actor, PROMPTS, plain) < 1e-5
    assert all(each.allowed is None for each in (*echoed, *mostly, *plain))
    limits = SamplingLimits(0.9, 12, 0.01)
    for prompt, each in zip(PROMPTS, generate(engine, PROMPTS, SamplingParams(10, 0.8, limits), range(8)), strict=True):
        ids = torch.tensor([*prompt, *each.token_ids])
        with torch.no_grad():
            logits = actor.lm(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.8
        kept = allowed_tokens(logits, limits)
        logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[torch.arange(len(kept)), each.token_ids]
        torch.testing.assert_close(torch.tensor(each.logprobs), logprobs, atol=1e-5, rtol=0)
        if "V2" in program:
            assert each.allowed.counts.tolist() == kept.sum(dim=1).tolist()
            assert each.allowed.listed()[1].tolist() == kept.nonzero()[:, 1].tolist()
        else:
            assert each.allowed is None


MOE = {
    **ARCHITECTURE, "model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True, "tie_word_embeddings": False, "decoder_sparse_step": 2,
}  # fmt: skip


@torch.no_grad()
def replayed_gap(actor, completions, replay):
    """Return the mean gap of log-probs between engine and trainer, with the engine's experts or without."""
    total, tokens = 0.0, 0
    for prompt, each in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *each.token_ids]])
        experts = RoutedExperts.of([each.experts]) if replay else None
        hidden = hidden_states(actor.lm, ids, None, experts=experts)[len(prompt) - 1 : -1]
        logprobs = actor.lm.lm_head(hidden).float().log_softmax(dim=-1)
        ours = logprobs[torch.arange(len(each.token_ids)), each.token_ids]
        total += float((ours - torch.tensor(each.logprobs)).abs().sum())
        tokens += len(each.token_ids)
    return total / tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_returns_the_experts_that_its_routers_chose(program, tmp_path, dtype):
    if "V2" not in program:
        pytest.skip("vLLM returns experts with model runner V2")
    source = FromConfig(MOE, seed=1, dtype=dtype)
    engine = VLLMEngine(arguments={"enable_return_routed_experts": True})
    engine.start(setup_of(source, tmp_path))
    try:
        actor = pushed(engine, source, 1)
        first = generate(engine, PROMPTS, NO_STOP, range(8))
        again = generate(engine, PROMPTS, NO_STOP, range(8))  # the prompts are in the cache
    finally:
        engine.close()
    routers = ForcedRouters(actor.lm)
    for prompt, one, other in zip(PROMPTS, first, again, strict=True):
        assert one.experts.shape == (len(prompt) + len(one.token_ids) - 1, 2, 2)
        assert torch.equal(one.experts[: len(prompt)], other.experts[: len(prompt)])
    with_replay, replaced = replayed_gap(actor, first, replay=True), routers.replaced_counts()
    without = replayed_gap(actor, first, replay=False)
    print(f"{dtype}: {with_replay:.3g} with, {without:.3g} without, replaced {replaced}")
    assert routers.sparse_layers == {1}
    if dtype == "float32":
        assert replaced[1] == 0
        assert with_replay < 1e-5
    else:
        assert replaced[0] > 200
        assert with_replay < without


def test_responses_in_flight_are_finished_with_the_weights_that_they_began_with(engine):
    first = pushed(engine, source_of(seed=1), version=1)
    generation = submit(engine, PROMPTS, NO_STOP, range(8))
    generate(engine, PROMPTS[:1], SamplingParams(3), [8])  # now the others have some tokens
    second = pushed(engine, source_of(seed=2), version=2)
    later = submit(engine, PROMPTS, SAMPLING, range(8))
    for actor, version, completions in ((first, 1, generation.result()), (second, 2, later.result())):
        assert largest_gap(actor, PROMPTS, completions) < 1e-5
        assert {completion.policy_version for completion in completions} == {version}


@pytest.mark.slow
@pytest.mark.parametrize("unfinished", ["continue", "cut"])
def test_responses_in_flight_continue_or_end_at_a_push(start, unfinished):
    engine = start(VLLMEngine(unfinished=unfinished))
    first = pushed(engine, source_of(seed=1), version=1)
    whole = generate(engine, PROMPTS, NO_STOP, range(8))
    generation = submit(engine, PROMPTS, NO_STOP, range(8))
    generate(engine, PROMPTS[:1], SamplingParams(3), [8])
    second = source_of(seed=2).causal().eval()
    engine.update_weights(parameters_of(second), 2)
    mixed = generation.result()
    assert largest_gap(second, PROMPTS, generate(engine, PROMPTS, SAMPLING, range(8))) < 1e-5
    for completion, other in zip(mixed, whole, strict=True):
        old = completion.token_versions.count(1)
        assert completion.token_versions == sorted(completion.token_versions)
        assert completion.token_ids[:old] == other.token_ids[:old]
        assert completion.logprobs[:old] == pytest.approx(other.logprobs[:old], abs=1e-6)
    begun = [(prompt, each) for prompt, each in zip(PROMPTS, mixed, strict=True) if 1 in each.token_versions]
    assert begun
    if unfinished == "cut":
        assert all(len(each.token_ids) < 24 and set(each.token_versions) == {1} for _, each in begun)
        assert largest_gap(first, *map(list, zip(*begun, strict=True))) < 1e-5
    else:
        assert all(len(each.token_ids) == 24 for each in mixed)
        assert any(set(each.token_versions) == {1, 2} for _, each in begun)


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_in_any_batch(engine):
    pushed(engine, source_of(seed=3))
    together = generate(engine, PROMPTS, SAMPLING, range(8))
    backwards = generate(engine, PROMPTS[::-1], SAMPLING, range(7, -1, -1))[::-1]
    alone = [generate(engine, [PROMPTS[index]], SAMPLING, [index])[0] for index in range(3)]
    assert [each.token_ids for each in backwards] == [each.token_ids for each in together]
    assert [each.token_ids for each in alone] == [each.token_ids for each in together[:3]]
    others = generate(engine, PROMPTS, SAMPLING, range(100, 108))
    assert [each.token_ids for each in others] != [each.token_ids for each in together]


@pytest.mark.slow
def test_sampled_tokens_have_the_frequencies_of_the_model(engine):
    actor = pushed(engine, source_of(seed=3))
    completions = generate(engine, [PROMPTS[0]] * 400, SamplingParams(1), range(400))
    counts = torch.bincount(torch.tensor([each.token_ids[0] for each in completions]), minlength=61)
    with torch.no_grad():
        expected = 400 * actor.lm(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    often = expected > 5
    rest = torch.stack([counts[~often].sum() - expected[~often].sum()]).square() / expected[~often].sum()
    distance = ((counts - expected).square() / expected)[often].sum() + rest.sum()
    freedom = int(often.sum())
    assert distance < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_log_probabilities_are_those_at_the_temperature(engine, temperature):
    actor = pushed(engine, source_of(seed=4))
    sampling = SamplingParams(10, temperature=temperature, stop_token_ids=(END,))
    assert largest_gap(actor, PROMPTS, generate(engine, PROMPTS, sampling, range(8)), temperature) < 1e-5


@pytest.mark.slow
def test_greedy_tokens_are_those_of_new_weights_with_and_without_a_prefix_cache(engine):
    for seed in (11, 12):
        actor = pushed(engine, source_of(seed=seed))
        for _ in range(2):
            completions = generate(engine, PROMPTS[:3], SamplingParams(6, temperature=0), [0] * 3)
            assert [each.token_ids for each in completions] == [greedy(actor, prompt, 6) for prompt in PROMPTS[:3]]


@pytest.mark.slow
def test_echo_of_prompts_in_several_chunks_has_the_log_probabilities_of_new_weights(engine):
    long = [(prompt * 20)[:100] for prompt in PROMPTS[:2]]  # of 64 tokens each
    for version in range(2):
        actor = pushed(engine, source_of(seed=version), version)
        without = generate(engine, long, SamplingParams(2), range(2))  # the prefix cache has the prompts now
        completions = generate(engine, long, SamplingParams(2, echo=True), range(2))
        for prompt, completion, sampled in zip(long, completions, without, strict=True):
            assert completion.token_ids == [*prompt[1:], *sampled.token_ids]
        assert largest_gap(actor, [prompt[:1] for prompt in long], completions) < 1e-5


@pytest.mark.slow
def test_swapped_adapters_give_the_log_probabilities_of_the_merged_model(start, tmp_path):
    source = source_of()
    engine = start(VLLMAdapterEngine(), lora=LoRA(rank=4, alpha=8))
    engine.update_weights(base_of(adapted(source, 0)), 0)
    for version in (1, 2):
        actor = adapted(source, version)
        engine.update_adapters(named_tensors(actor, is_adapter), version)
        completions = generate(engine, PROMPTS, SAMPLING, range(8))
        assert largest_gap(exported(actor, tmp_path / str(version)), PROMPTS, completions) < 1e-4
        assert {completion.policy_version for completion in completions} == {version}


@pytest.mark.slow
def test_conversations_have_the_log_probabilities_of_their_turns(engine):
    actor = pushed(engine, source_of(seed=1))
    requested = requests(8, turns=3)
    completions = converse(engine, requested, max_turns=3)
    assert max(len(each.conversation.turn_ends) for each in completions) > 1
    assert largest_gap_of_sampled(actor, requested, completions) < 1e-5
    again = converse(engine, requested[::-1], max_turns=3)[::-1]
    assert [each.token_ids for each in again] == [each.token_ids for each in completions]


@pytest.mark.slow
def test_engine_that_is_killed_while_it_generates_gives_the_same_responses(start):
    engine = start(VLLMEngine())
    actor = pushed(engine, source_of(seed=1), version=1)
    expected = generate(engine, PROMPTS, NO_STOP, range(8))
    generation = submit(engine, PROMPTS, NO_STOP, range(8))
    generate(engine, PROMPTS[:1], SamplingParams(3), [8])
    os.kill(engine._process.process.pid, signal.SIGKILL)
    completions = generation.result()
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    assert largest_gap(actor, PROMPTS, completions) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_engine_and_actor_agree_in_every_step_of_a_run(program, tmp_path, max_staleness):
    made = Run(
        tmp_path,
        loop={"engine": VLLMEngine(), "max_staleness": max_staleness, "check_rows": 2, "validate_at_ends": False},
        model={
            "correction": RolloutCorrection(level="token"),
            "optimizer": partial(torch.optim.SGD, lr=0.5),
            "minibatch_size": 2,
        },
        trainer={"max_steps": 3, "max_epochs": -1},
    ).fit()
    assert program in made.loop.engine_description
    assert made.trainer.global_step == 3
