"""vLLM for an actor with adapters, merged or swapped: it computes the same as the merged model in transformers."""

import copy
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from lightning_rlhf import PPOModule, PromptDataModule
from lightning_rlhf.batching.sequences import join
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.causal import CausalLM
from lightning_rlhf.models.lora import LoRA, base_name, is_adapter, merged
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.engine import VLLMAdapterEngine, VLLMEngine
from lightning_rlhf.types import SamplingParams
from tests.rollout.engines import END, greedy, largest_gap, prompts_of, setup_of, source_of
from tests.stand_ins import Response, TinyModel, quiet_trainer, rollout_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LORA = LoRA(rank=4, alpha=8)
TIED, UNTIED = source_of(), source_of(model_type="qwen2", tie_word_embeddings=False)
LONG = [prompt * 60 for prompt in prompts_of(3, longest=1)]  # several cache blocks
GREEDY = SamplingParams(12, temperature=0)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that starts an engine for a model with adapters, or returns the one that was started before."""
    pytest.importorskip("vllm")
    started = {}

    def start(kind, source):
        key = (kind, source.architecture["model_type"])
        if key not in started:
            started[key] = kind()
            started[key].start(replace(setup_of(source, tmp_path_factory.mktemp("engine")), lora=LORA))
        return started[key]

    yield start
    for engine in started.values():
        engine.close()


def adapted(source, seed):
    """Return an actor whose adapters change the outputs."""
    actor = replace(source, lora=LORA).causal().eval()
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in actor.lm.named_parameters():
        if is_adapter(name):
            parameter.data.normal_(std=0.2, generator=draw)
    return actor


def named_tensors(actor, wanted):
    return [(name, p.detach()) for name, p in actor.lm.named_parameters() if wanted(name)]


def base_of(actor):
    return [(base_name(name), tensor) for name, tensor in named_tensors(actor, lambda name: not is_adapter(name))]


def exported(actor, directory):
    """Return the model as transformers loads it from an export with merged weights."""
    actor.save_pretrained(directory)
    return CausalLM(AutoModelForCausalLM.from_pretrained(directory)).eval()


@torch.no_grad()
def rounding(model, exact, prompts, completions):
    """Return the largest difference between the log-probs of `model` and those of its float64 copy, in nats."""
    rollout = rollout_of([Response(p, c.token_ids) for p, c in zip(prompts, completions, strict=True)])
    input_ids, index = join(rollout)
    ours, theirs = (m(input_ids, index, rollout.response_ids, rollout.response_mask).logprobs for m in (model, exact))
    return (ours - theirs).abs().max().item()


def assert_agrees(model, engine, version, nats=1e-5):
    for _ in range(2):  # the second time from the prefix cache
        completions = generate(engine, [*LONG, [5, 6]], GREEDY, [0] * 4)
        assert [c.token_ids for c in completions] == [greedy(model, prompt, 12) for prompt in [*LONG, [5, 6]]]
    prompts = prompts_of(16)
    completions = generate(engine, prompts, SamplingParams(24, stop_token_ids=(END,)), range(16))
    # Adapters this large make the rounding of transformers visible on some CPUs (2e-5): float64 is the reference.
    exact = copy.deepcopy(model).double()
    assert largest_gap(exact, prompts, completions) < max(nats, 2 * rounding(model, exact, prompts, completions))
    assert {completion.policy_version for completion in completions} == {version}


@pytest.mark.slow
@pytest.mark.parametrize("source", [TIED, pytest.param(UNTIED, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_engine_agrees_with_the_merged_model_after_every_swap(start, source, tmp_path):
    engine = start(VLLMAdapterEngine, source)
    engine.update_weights(base_of(adapted(source, 0)), 0)
    for version in (1, 2, 3):
        actor = adapted(source, version)
        engine.update_adapters(named_tensors(actor, is_adapter), version)
        model = exported(actor, tmp_path / str(version))
        assert_agrees(model, engine, version, nats=1e-4)  # W x + B A x, not (W + B A) x: rounded in another order


@pytest.mark.slow
def test_engine_agrees_with_the_merged_model_after_every_push_of_merged_weights(start, tmp_path):
    engine = start(VLLMEngine, TIED)
    for version in (1, 2):
        actor = adapted(TIED, version)
        engine.update_weights(merged(actor.lm, named_tensors(actor, lambda name: True)), version)
        assert_agrees(exported(actor, tmp_path / str(version)), engine, version)


@pytest.mark.slow
def test_echo_returns_log_probabilities_of_prompts_with_the_new_adapters(start):
    engine, prompts = start(VLLMAdapterEngine, TIED), prompts_of(6)
    engine.update_weights(base_of(adapted(TIED, 0)), 0)
    for version in (1, 2):
        actor = adapted(TIED, version)
        engine.update_adapters(named_tensors(actor, is_adapter), version)
        completions = generate(engine, prompts, SamplingParams(2, echo=True), range(6))
        assert [completion.token_ids[:-2] for completion in completions] == [prompt[1:] for prompt in prompts]
        assert largest_gap(actor, [prompt[:1] for prompt in prompts], completions) < 1e-4


@pytest.mark.slow
def test_swap_sends_only_adapters(start):
    engine = start(VLLMAdapterEngine, TIED)
    engine.update_weights(base_of(adapted(TIED, 0)), 0)
    engine.update_adapters(named_tensors(adapted(TIED, 1), is_adapter), 1)
    with safe_open(engine._directory / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == 2 * 7 * 2  # layers, matrices, A and B
    assert all(".lora_" in name for name in names)


@pytest.mark.slow
def test_wrong_adapter_is_reported(start):
    engine = start(VLLMAdapterEngine, TIED)
    actor = adapted(TIED, 4)
    engine.update_weights(base_of(actor), 0)
    engine.update_adapters(named_tensors(actor, is_adapter), 1)
    assert engine.first_difference(named_tensors(actor, is_adapter)) is None
    name = "model.layers.1.mlp.up_proj.lora_B.default.weight"
    actor.lm.get_parameter(name).data[3, 1] += 1e-6
    assert engine.first_difference(named_tensors(actor, is_adapter)) == name
    assert engine.first_difference([]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lost", ["nothing", "scale", "layer"])
def test_adapters_that_vllm_loses_in_part_are_noticed(lost, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGETFUL", lost)
    source = replace(TIED, dtype=dtype)
    engine = VLLMAdapterEngine(
        arguments={"worker_extension_cls": "tests.rollout.forgetful_adapters.ForgetfulOfAdapters"}
    )
    engine.start(replace(setup_of(source, tmp_path), lora=LORA))
    actor = adapted(source, 1)
    try:
        engine.update_weights(base_of(adapted(source, 0)), 0)
        engine.update_adapters(named_tensors(actor, is_adapter), 1)
        generate(engine, [[5, 6]], GREEDY, [0])  # vLLM uses an adapter from the first request on
        found = engine.first_difference(named_tensors(actor, is_adapter))
    finally:
        engine.close()
    assert (found is None) == (lost == "nothing")
    assert found is None or re.match(r"the adapters' lora_[AB], of which vLLM holds a sum of", found)


@pytest.mark.slow
def test_new_weights_are_used_without_the_adapter_of_the_old_ones(start):
    engine = start(VLLMAdapterEngine, TIED)
    actor = adapted(TIED, 5)
    engine.update_weights(base_of(actor), 0)
    engine.update_adapters(named_tensors(actor, is_adapter), 1)
    engine.update_weights(base_of(actor), 2)
    assert_agrees(TIED.causal().eval(), engine, 2)


@pytest.mark.slow
def test_engine_and_actor_agree_at_every_step_of_a_run_that_swaps_adapters(tmp_path):
    def shares(completions):
        return [text.count("a") / max(len(text), 1) for text in completions]

    sgd = partial(torch.optim.SGD, lr=2.0)
    module = PPOModule(
        TinyModel(lora=LORA), optimizer=sgd, critic_optimizer=sgd, minibatch_size=4, kl_loss=KLTerm(0.1, "k3")
    )
    engine = VLLMAdapterEngine()
    loop = RolloutLoop([RewardFunction(shares)], engine, max_response_tokens=8, check_rows=4, validate_at_ends=False)
    rows = InMemory([{"prompt": prompt} for prompt in ["a", "bb", "ccc", "d"] * 4])
    data = PromptDataModule(rows, tokenizer=CharacterTokenizer("abcdefg"), batch_size=4, max_tokens=8)
    trainer = quiet_trainer(default_root_dir=tmp_path, callbacks=[loop], max_steps=4)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 4
    assert trainer.callback_metrics["rollout/logprob_diff_max"] < 1e-5
    assert trainer.callback_metrics["kl/ref"].abs() > 1e-3  # the adapters changed the policy of the engine


# -- without an engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "^VLLMAdapterEngine pushes LoRA adapters, but the actor has none: set lora in its source, or use VLLME"),
        (LoRA(513, 1), "^vLLM supports adapters up to rank 512, but these have rank 513: use merged"),
    ],
)
def test_adapters_that_vllm_cannot_swap_are_rejected_before_it_starts(lora, message, tmp_path):
    pytest.importorskip("vllm")
    engine = VLLMAdapterEngine()
    with pytest.raises(ValueError, match=message):
        engine.start(replace(setup_of(TIED, tmp_path), lora=lora))
    assert engine._process is None


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (17, 32), (512, 512)])
def test_vllm_allocates_the_supported_rank_above_that_of_the_adapters(rank, room, tmp_path):
    pytest.importorskip("vllm")
    setup = replace(setup_of(TIED, tmp_path), lora=LoRA(rank, 1))
    arguments = VLLMAdapterEngine(arguments={"max_cpu_loras": 3}).llm_arguments(setup)
    assert (arguments["enable_lora"], arguments["max_lora_rank"], arguments["max_cpu_loras"]) == (True, room, 3)


@pytest.mark.parametrize(
    ("lora", "layers"),
    [
        (LORA, ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (LoRA(4, 8, target_modules=["v_proj", "q_proj"]), ["q_proj", "v_proj"]),
    ],
)
def test_vllm_wraps_only_layers_that_the_actor_adapts(lora, layers, tmp_path):
    pytest.importorskip("vllm")
    setup = replace(setup_of(TIED, tmp_path), lora=lora)
    assert VLLMAdapterEngine().llm_arguments(setup)["lora_target_modules"] == layers


def test_supported_adapter_ranks_equal_those_of_vllm():
    """Found in vLLM 0.32; if this fails, update RANKS."""
    pytest.importorskip("vllm")
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    from lightning_rlhf.rollout.vllm.adapters import RANKS

    assert get_args(MaxLoRARanks) == RANKS


def test_other_engines_receive_merged_weights():
    pytest.importorskip("vllm")
    assert not VLLMEngine().traits.swaps_adapters
    with pytest.raises(NotImplementedError, match="VLLMEngine takes merged weights"):
        VLLMEngine().update_adapters([], 0)
    assert SharedEngine(VLLMAdapterEngine(), ranks=2).traits.swaps_adapters
    assert not SharedEngine(VLLMEngine(), ranks=2).traits.swaps_adapters
