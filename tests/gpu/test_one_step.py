"""On a GPU, the engine has the trainer's log-probabilities, and one PPO step trains. Skipped without a GPU."""

from functools import partial

import pytest
import torch

from lightning_rlhf import PPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingParams
from tests.rollout.engines import ARCHITECTURE, MAX_TOKENS, largest_gap, parameters_of, prompts_of, setup_of
from tests.stand_ins import quiet_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
# Heads of 64, which every attention kernel of vLLM takes, and a bound for kernels that round otherwise than torch's.
ON_GPU = ARCHITECTURE | {"hidden_size": 128, "head_dim": 64, "initializer_range": 0.05}
BOUNDS = {"float32": 1e-2, "bfloat16": 0.3}


def source_of(dtype, seed=0):
    return FromConfig(ON_GPU, seed=seed, dtype=dtype)


@pytest.fixture(params=["vllm", "transformers"])
def make_engine(request):
    """Create engines and close them."""
    if request.param == "vllm" and not vllm_installed():
        pytest.skip("vLLM is not installed")
    made = []

    def make_engine():
        made.append(VLLMEngine(gpu_memory_utilization=0.2) if request.param == "vllm" else TransformersEngine())
        return made[-1]

    yield make_engine
    for engine in made:
        engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_equal_the_trainer_after_every_push(make_engine, dtype, tmp_path):
    engine = make_engine()
    engine.start(setup_of(source_of(dtype), tmp_path))
    assert "cuda" in engine.wait().lower() or torch.cuda.get_device_name() in engine.wait()
    for version in range(2):
        actor = source_of(dtype, seed=version).causal().eval().cuda()
        engine.update_weights(parameters_of(actor), version)
        completions = generate(engine, prompts_of(16), SamplingParams(32), range(16))
        assert {completion.policy_version for completion in completions} == {version}
        assert engine.first_difference(parameters_of(actor)) is None
        assert largest_gap(actor.cpu(), prompts_of(16), completions) < BOUNDS[dtype]


def test_equal_requests_give_equal_tokens(make_engine, tmp_path):
    engine = make_engine()
    engine.start(setup_of(source_of("float32"), tmp_path))
    engine.update_weights(parameters_of(source_of("float32").causal().cuda()), 0)
    first, second = (generate(engine, prompts_of(16), SamplingParams(32), range(16)) for _ in range(2))
    assert [completion.token_ids for completion in first] == [completion.token_ids for completion in second]


def share_of_a(completions):
    return [text.count("a") / max(len(text), 1) for text in completions]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_ppo_step_changes_the_weights_and_passes_the_check(make_engine, precision, tmp_path):
    architecture = ON_GPU | {"vocab_size": 11}
    adam = partial(torch.optim.AdamW, lr=1e-3)
    module = PPOModule(FromConfig(architecture, seed=0), optimizer=adam, critic_optimizer=adam, minibatch_size=8)
    data = PromptDataModule(
        InMemory([{"prompt": "abc"}] * 16), CharacterTokenizer("abcdefg"), batch_size=8, max_tokens=8
    )
    loop = RolloutLoop([RewardFunction(share_of_a)], make_engine(), max_response_tokens=8)
    trainer = quiet_trainer(
        accelerator="gpu", devices=1, precision=precision, callbacks=[loop], default_root_dir=tmp_path, max_steps=2
    )
    trainer.fit(module, datamodule=data)
    before = FromConfig(architecture, seed=0).causal().lm.get_input_embeddings().weight  # the same on every device
    after = module.actor.lm.get_input_embeddings().weight.detach().cpu()
    assert trainer.global_step == 2
    assert not torch.equal(before, after)
    assert torch.isfinite(after).all()
    assert trainer.callback_metrics["rollout/logprob_diff_max"] < BOUNDS["bfloat16"]


def test_engine_leaves_memory_to_the_trainer(tmp_path):
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    engine = VLLMEngine(gpu_memory_utilization=0.2)
    try:
        source = source_of("bfloat16")
        engine.start(EngineSetup(setup_of(source, tmp_path).model, "bfloat16", MAX_TOKENS, tmp_path / "engine.log"))
        engine.wait()
        free, total = torch.cuda.mem_get_info()
        assert free > 0.7 * total
    finally:
        engine.close()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] > 0.9 * total


def losses(engine, tmp_path, steps=3):
    """Return the loss of each step of a run with the given engine."""
    module = PPOModule(
        FromConfig(ON_GPU | {"vocab_size": 11}, seed=0),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        critic_optimizer=partial(torch.optim.AdamW, lr=1e-3),
        minibatch_size=8,
    )
    rows = InMemory([{"prompt": "abc"}] * 8 * steps)
    data = PromptDataModule(rows, CharacterTokenizer("abcdefg"), batch_size=8, max_tokens=8)
    loop = RolloutLoop([RewardFunction(share_of_a)], engine, max_response_tokens=8, validate_at_ends=False)
    trainer = quiet_trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        callbacks=[loop],
        default_root_dir=tmp_path,
        max_steps=steps,
        deterministic=True,
    )
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == steps
    return float(trainer.callback_metrics["loss/policy"]), module.actor


def test_sleeping_engine_receives_every_push_and_frees_its_memory(tmp_path):
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    free = []

    class Watching(VLLMEngine):
        def sleep(self):
            before = torch.cuda.mem_get_info()[0]
            super().sleep()
            free.append(torch.cuda.mem_get_info()[0] - before)

    # The check of engine and actor, which is on, would find weights that were lost in the sleep.
    losses(Watching(gpu_memory_utilization=0.3, sleep_while_learning=True), tmp_path)
    assert len(free) == 4  # at the start, and after each of three rollouts
    assert min(free) > 0.15 * torch.cuda.mem_get_info()[1]


def test_deterministic_engine_and_trainer_repeat_a_run(tmp_path):
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    runs = [losses(VLLMEngine(0.3, deterministic=True), tmp_path / name) for name in ("first", "second")]
    assert runs[0][0] == runs[1][0]
    pairs = zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_cache_size_is_independent_of_the_models_of_the_trainer(tmp_path):
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    blocks = set()
    for number, width in enumerate((128, 2048)):
        model = FromConfig(ON_GPU | {"vocab_size": 11}, seed=0)
        critic = FromConfig(ON_GPU | {"vocab_size": 11, "hidden_size": width, "intermediate_size": 4 * width}, seed=0)
        loop = RolloutLoop([RewardFunction(share_of_a)], VLLMEngine(0.3), max_response_tokens=8)
        data = PromptDataModule(
            InMemory([{"prompt": "abc"}] * 8), CharacterTokenizer("abcdefg"), batch_size=8, max_tokens=8
        )
        trainer = quiet_trainer(
            accelerator="gpu", devices=1, callbacks=[loop], default_root_dir=tmp_path / str(number), max_steps=1
        )
        trainer.fit(PPOModule(model, critic=critic, minibatch_size=8), datamodule=data)
        blocks.add(loop.engine_description.rpartition("cache of ")[2])
    assert len(blocks) == 1
