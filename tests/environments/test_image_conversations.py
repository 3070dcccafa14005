"""Conversations with pictures in the prompt and in replies: engine and trainer see the same."""

import json

import pytest

from lightning_rlhf import GRPOModule, Pretrained, PromptDataModule
from lightning_rlhf.callbacks import RolloutLog, RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.environments import Environment, EnvironmentSettings
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from tests.distributed.tasks import share_of_a, with_pictures
from tests.environments import worlds
from tests.stand_ins import quiet_trainer
from tests.vision_models import write_checkpoint

WORDS = ["a", "bc", "cab", "ga", "eca", "f"]


class Questions(Environment):
    """Begins with a question, and replies to each turn; its rows have the images of their prompts."""

    def reset(self, row, seed):
        shown = row["images"] or []
        return f"{len(shown)} images <image>"

    def step(self, turn):
        return "and?"


class Silent(Questions):
    """Appends nothing to the prompt."""

    def reset(self, row, seed):
        return None


@pytest.mark.quick_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("factory", [Questions, Silent])
@pytest.mark.parametrize("bridge", ["template", "plain"])
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def test_logprobs_of_engine_and_trainer_are_equal(tmp_path, factory, bridge, engine):
    model = str(write_checkpoint("idefics3", tmp_path / "model"))
    data = PromptDataModule(
        InMemory(with_pictures([{"prompt": word} for word in WORDS])), tokenizer=model, batch_size=6, max_tokens=110
    )
    loop = RolloutLoop(
        [RewardFunction(share_of_a)],
        TransformersEngine() if engine == "transformers" else VLLMEngine(),
        group_size=2,
        max_response_tokens=100,
        stop_token_ids=list(range(50, 97)),  # turns end soon
        environment=EnvironmentSettings(factory, bridge=bridge, max_turns=3, max_turn_tokens=20, timeout_s=None),
    )
    module = GRPOModule(Pretrained(model), minibatch_size=12)
    trainer = quiet_trainer(max_steps=2, callbacks=[loop], default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    assert float(trainer.callback_metrics["rollout/logprob_diff_max"]) < 1e-4
    rollout = module.last_step.experience.rollout
    assert not bool(rollout.response_mask.all())
    assert rollout.images is not None
    assert int((rollout.images.numbers >= 0).sum()) > 0


def run(tmp_path, name, rows, engine, **settings):
    model = str(write_checkpoint(name, tmp_path / "model"))
    data = PromptDataModule(InMemory(rows), tokenizer=model, batch_size=6, max_tokens=110)
    log = RolloutLog()
    loop = RolloutLoop(
        [RewardFunction(share_of_a)],
        engine,
        group_size=2,
        max_response_tokens=200,
        stop_token_ids=list(range(50, 97)),  # turns end soon
        environment=EnvironmentSettings(worlds.Drawings, max_turns=4, max_turn_tokens=20, timeout_s=None, **settings),
    )
    module = GRPOModule(Pretrained(model), minibatch_size=12)
    trainer = quiet_trainer(max_steps=2, callbacks=[loop, log], default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    return trainer, module, loop


ENGINES = ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]


def engine_of(name):
    return TransformersEngine() if name == "transformers" else VLLMEngine()


@pytest.mark.quick_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_prompts", [True, False])
@pytest.mark.parametrize("bridge", ["template", "plain"])
@pytest.mark.parametrize("engine", ENGINES)
def test_pictures_of_an_environment(tmp_path, in_prompts, bridge, engine):
    rows = [{"prompt": word} for word in WORDS]
    if in_prompts:
        rows = with_pictures(rows)
    elif bridge == "template":
        rows = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
    trainer, module, loop = run(tmp_path, "idefics3", rows, engine_of(engine), bridge=bridge, max_images=3)
    assert float(trainer.callback_metrics["rollout/logprob_diff_max"]) < 1e-4
    rollout = module.last_step.experience.rollout
    (token,) = module.image_tokens
    is_image = rollout.response_ids == token
    assert bool(is_image.any())
    assert not bool((is_image & rollout.response_mask).any())
    counts = [len(record.images) for record in loop.conversations.values()]
    assert max(counts) == 3
    first = json.loads((tmp_path / "rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert len(first["images"]) == in_prompts + len(loop.conversations[0].images)
    assert all((tmp_path / "rollouts" / image["file"]).is_file() for image in first["images"])
    written = [part["text"] for part in first["segments"] if part["from"] == "environment"]
    assert any("<image>" in text for text in written)
    assert not any("<image><image>" in text for text in written)
    assert sorted(rollout.images.written) == sorted(
        {image.number for record in loop.conversations.values() for image in record.images}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_pictures_of_an_environment_with_other_models(tmp_path, name):
    rows = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
    trainer, _, loop = run(tmp_path, name, rows, TransformersEngine(), max_images=3)
    assert float(trainer.callback_metrics["rollout/logprob_diff_max"]) < 1e-4
    assert max(len(record.images) for record in loop.conversations.values()) == 3
