"""Conversations with an environment about a picture in the prompt: engine and trainer see the same."""

import pytest

from lightning_rlhf import GRPOModule, Pretrained, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.environments import Environment, EnvironmentSettings
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from tests.distributed.tasks import share_of_a, with_pictures
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
    assert int((rollout.images >= 0).sum()) > 0
