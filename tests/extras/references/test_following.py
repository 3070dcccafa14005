"""The reference after some steps is the mean that the formula gives, also after a resume, and refusals say why."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import DPOModule, GRPOModule
from lightning_rlhf.callbacks import RunCheckpoint
from lightning_rlhf.extras.references.following import FollowingReference
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.objectives.kl_controllers import KLTerm
from tests.callbacks.conftest import Run
from tests.stand_ins import TinyModel, fit, quiet_trainer, responses, rollout_of

KL = {"kl_reward": KLTerm(0.1)}


class Actors(Callback):
    """Keeps the actor's weights after each step."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append([parameter.detach().clone() for parameter in pl_module.actor.parameters()])


def references(steps, *callbacks, **options):
    """Return the weights of the reference after a run, and the actor's after each step."""
    actors = Actors()
    sgd = partial(torch.optim.SGD, lr=0.1)
    module = GRPOModule(TinyModel(), TinyModel(seed=1), optimizer=sgd, **{"kl_loss": KLTerm(0.1, "k3"), **options})
    rollout = rollout_of(responses(6, seed=8))
    rollout.group[:] = torch.arange(6) // 3
    fit(module, [rollout] * steps, callbacks=[actors, *callbacks], max_epochs=1, strategy="rlhf_single")
    return [parameter.detach() for parameter in module.ref.parameters()], actors.weights


def test_reference_is_a_mean_of_itself_and_the_actor_every_few_steps():
    start, _ = references(1)
    ref, actors = references(5, FollowingReference(every_n_steps=2, mix=0.25))
    # by hand: after steps 2 and 4
    for value, first, second, fourth in zip(ref, start, actors[1], actors[3], strict=True):
        expected = 0.75 * (0.75 * first + 0.25 * second) + 0.25 * fourth
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert max(float((a - b).abs().max()) for a, b in zip(actors[1], actors[3], strict=True)) > 1e-3


def test_moving_average_of_every_step_is_that_of_a_loop():
    mean = [value.double() for value in references(1)[0]]
    ref, actors = references(6, FollowingReference(every_n_steps=1, mix=0.05))
    for weights in actors:
        mean = [0.95 * old + 0.05 * new.double() for old, new in zip(mean, weights, strict=True)]
    for value, expected in zip(ref, mean, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)


def test_with_mix_1_it_is_a_copy():
    ref, actors = references(3, FollowingReference(every_n_steps=3, mix=1.0))
    assert all(map(torch.equal, ref, actors[2]))
    plain, _ = references(3, FollowingReference(every_n_steps=4))
    assert not all(map(torch.equal, plain, actors[2]))


def test_resumed_run_has_the_same_bits(tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 5:
                raise KeyboardInterrupt

    def run(*callbacks, resume=None):
        trainer = {"max_steps": 8, "max_epochs": -1, "enable_checkpointing": True, "strategy": "rlhf_single"}
        follow = [FollowingReference(2, 0.3), RunCheckpoint(every_n_steps=3), *callbacks]
        made = Run(tmp_path, model={**KL, "ref": TinyModel(seed=1)}, trainer=trainer, callbacks=follow)
        if callbacks:
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                made.fit()
        else:
            made.fit(ckpt_path=resume)
        parameters = [*made.module.actor.parameters(), *made.module.ref.parameters()]
        return [parameter.detach().clone() for parameter in parameters]

    whole = run()
    run(Stop())
    assert all(map(torch.equal, run(resume=tmp_path / "checkpoints/last.ckpt"), whole))


def test_checkpoint_without_the_reference_is_not_resumed(tmp_path):
    options = {"model": {**KL, "ref": TinyModel(seed=1)}}
    trainer = {"max_steps": 2, "max_epochs": -1, "enable_checkpointing": True, "strategy": "rlhf_single"}
    Run(tmp_path, trainer=trainer, callbacks=[RunCheckpoint()], **options).fit()
    more = {**trainer, "max_steps": 3}
    made = Run(tmp_path, trainer=more, callbacks=[RunCheckpoint(), FollowingReference()], **options)
    with pytest.raises(ValueError, match="contains actor, critic, but this run changes actor, critic, ref"):
        made.fit(ckpt_path=tmp_path / "checkpoints/last.ckpt")


@pytest.mark.parametrize(
    ("options", "mix", "message"),
    [
        ({"kl_loss": KLTerm()}, 0.6, "that of GRPOModule is not used"),
        ({"actor": TinyModel(lora=LoRA(rank=2, alpha=4)), "ref": None}, 0.6, "is the actor without its adapters"),
        ({"actor": TinyModel(lora=LoRA(rank=2, alpha=4))}, 0.6, "the actor trains adapters only: remove lora"),
        ({"ref": TinyModel(seed=1, dtype="bfloat16")}, 0.01, "by less than their rounding: set dtype: float32"),
        (
            {"ref": TinyModel({**TinyModel().architecture, "intermediate_size": 40})},
            0.6,
            "the architecture of the actor",
        ),
    ],
)
def test_reference_that_cannot_follow_is_rejected(options, mix, message):
    made = {"actor": TinyModel(), "ref": TinyModel(seed=1), "kl_loss": KLTerm(0.1, "k3"), **options}
    with pytest.raises(ValueError, match=message):
        fit(
            GRPOModule(**made),
            [rollout_of(responses(4, seed=1))],
            callbacks=[FollowingReference(mix=mix)],
            strategy="rlhf_single",
        )


def test_strategy_of_lightning_is_rejected():
    module = GRPOModule(TinyModel(), TinyModel(seed=1), kl_loss=KLTerm(0.1, "k3"))
    with pytest.raises(ValueError, match="how SingleDeviceStrategy divides weights: use rlhf_fsdp, rlhf_ddp or rlhf_s"):
        fit(module, [rollout_of(responses(4, seed=1))], callbacks=[FollowingReference()])


def test_module_without_reference_is_rejected():
    trainer = quiet_trainer(callbacks=[FollowingReference()])
    module = DPOModule(TinyModel(), ref="start")
    with pytest.raises(ValueError, match="that of DPOModule is not used"):
        FollowingReference().setup(trainer, module, "fit")


@pytest.mark.parametrize(
    ("options", "message"), [({"every_n_steps": 0}, "at least 1"), ({"mix": 0.0}, "mix must lie in")]
)
def test_invalid_settings_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        FollowingReference(**options)


def test_other_frozen_models_stay(tmp_path):
    models = {"ref": TinyModel(seed=1), "reward_model": TinyModel(seed=2)}
    made = Run(
        tmp_path, model={**KL, **models}, trainer={"strategy": "rlhf_single"}, callbacks=[FollowingReference(1, 1.0)]
    ).fit()
    before = TinyModel(seed=2).scalar().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in made.module.reward_model.state_dict().items())
    pairs = zip(made.module.actor.parameters(), made.module.ref.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
