"""Image encoders in modules: equal frozen ones encode each image once for all roles, trained ones keep nothing."""

import pytest

from lightning_rlhf import FromConfig, GRPOModule, PPOModule, Pretrained, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.extras.images import model as images
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.distributed.tasks import share_of_a, with_pictures
from tests.stand_ins import quiet_trainer
from tests.vision_models import architecture, write_checkpoint


def fitted(make, tmp_path, monkeypatch, source=None, **options):
    """Train two epochs of two steps; return the module and the number of images that the trainer encoded."""
    model = str(write_checkpoint("idefics3", tmp_path / "model"))
    encoded = []
    encode = images.encode_images

    def counted(lm, tensors, *further):
        encoded.append(len(tensors))
        return encode(lm, tensors, *further)

    monkeypatch.setattr(images, "encode_images", counted)
    monkeypatch.setattr(images.TextImages, "generation_arguments", lambda *_: {})
    rows = with_pictures([{"prompt": word} for word in ("a", "bc", "cab", "ga")])  # pictures 1, 2 and 2 of 20 x 40
    data = PromptDataModule(InMemory(rows), tokenizer=model, batch_size=2, max_tokens=110)
    loop = RolloutLoop(
        [RewardFunction(share_of_a)], TransformersEngine(), group_size=2, max_response_tokens=4, check_rows=0
    )
    module = make(source or Pretrained(model, **options), minibatch_size=4, kl_loss=KLTerm(0.1, "k3"))
    trainer = quiet_trainer(max_steps=4, max_epochs=-1, callbacks=[loop], default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    return module, sum(encoded)


@pytest.mark.slow
@pytest.mark.parametrize("make", [GRPOModule, PPOModule])
def test_each_image_is_encoded_once_in_a_run(tmp_path, monkeypatch, make):
    module, encoded = fitted(make, tmp_path, monkeypatch)
    distinct = len(module.trainer.datamodule.image_store.images)
    assert encoded == distinct == 3
    assert module.actor.image_features is module.ref.image_features


@pytest.mark.slow
def test_random_models_keep_their_own_features(tmp_path, monkeypatch):
    """The encoders of an actor and a critic differ, because their classes draw weights in another order."""
    sources = FromConfig(architecture("idefics3"), seed=0)
    module, encoded = fitted(PPOModule, tmp_path, monkeypatch, source=sources)
    assert module.actor.image_features is not module.critic.image_features
    assert encoded == 3 * 3  # actor, critic and reference


@pytest.mark.slow
def test_trained_encoders_encode_in_every_pass(tmp_path, monkeypatch):
    module, encoded = fitted(GRPOModule, tmp_path, monkeypatch, train_vision=True)
    assert module.actor.image_features is None
    assert module.ref.image_features is not None
    assert encoded > 2 * 3
