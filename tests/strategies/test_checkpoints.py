"""Checkpoints under a role strategy in one process: their content, and errors for incompatible ones."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import nn

import lightning_rlhf.strategies.registry  # noqa: F401
from lightning_rlhf import PPOModule
from lightning_rlhf.modules.algorithms import GRPOModule
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.strategies.checkpoints import background, manifest
from lightning_rlhf.strategies.checkpoints.background import SaveOptions
from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints
from tests.stand_ins import HandOver, TinyModel, fit, quiet_trainer, responses, rollout_of
from tests.strategies.test_role_state import ListedSGD

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
ADAM = partial(torch.optim.AdamW, lr=1e-2)
MORE = {"strategy": "rlhf_single", "max_epochs": -1}


def ppo(kind=PPOModule, critic_optimizer=ADAM, **options):
    more = {"critic": TinyModel(seed=1), "critic_optimizer": critic_optimizer} if issubclass(kind, PPOModule) else {}
    return kind(TinyModel(), optimizer=ADAM, minibatch_size=4, **more, **options)


def batches(count):
    return [rollout_of(responses(4, seed=i)) for i in range(count)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A module after two steps, and its checkpoint."""
    module = ppo(kl_reward=KLTerm(0.1), ref=TinyModel(seed=3))
    trainer = fit(module, batches(2), max_steps=2, **MORE)
    path = tmp_path_factory.mktemp("saved") / "half.ckpt"
    trainer.save_checkpoint(path)
    return module, path


def test_roles_are_separate_files_and_frozen_roles_are_not_saved(saved):
    _, path = saved
    version = manifest.verified(path)
    assert sorted(entry.name for entry in version.iterdir()) == ["actor", "critic", "state.pt"]
    rest = torch.load(version / "state.pt", weights_only=True)
    assert rest["state_dict"] == {}
    assert "optimizer_states" not in rest
    assert rest["global_step"] == 2


def test_resumed_training_is_bitwise_equal(saved):
    _, path = saved
    options = {"kl_reward": KLTerm(0.1), "ref": TinyModel(seed=3)}
    straight, resumed = ppo(**options), ppo(**options)
    fit(straight, batches(4), max_steps=4, **MORE)
    fit(resumed, batches(4)[2:] * 2, ckpt=path, max_steps=4, **MORE)
    for (name, ours), theirs in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def validated(module, path):
    module.validation_step = lambda batch, batch_idx: None
    quiet_trainer(strategy="rlhf_single", callbacks=[HandOver()]).validate(module, [torch.zeros(1)], ckpt_path=path)
    return module


def test_validation_reads_only_the_weights_of_its_roles(saved):
    trained, path = saved
    both, only_actor = validated(ppo(), path), validated(ppo(GRPOModule), path)
    for module, roles in ((both, ("actor", "critic")), (only_actor, ("actor",))):
        for role in roles:
            ours, theirs = getattr(module, role).state_dict(), getattr(trained, role).state_dict()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert both.trainer.strategy.optimizers == []


def test_run_that_trains_other_roles_gets_an_error_with_the_saved_ones(saved, tmp_path):
    _, path = saved
    with pytest.raises(ValueError, match=r"half\.ckpt contains actor, critic, but this run changes actor: use"):
        fit(ppo(GRPOModule), batches(1), ckpt=path, **MORE)
    trainer = fit(ppo(GRPOModule), batches(1), max_steps=1, **MORE)
    trainer.save_checkpoint(tmp_path / "actor.ckpt")
    message = r"actor\.ckpt contains actor, but this run changes actor, critic: use the module and configuration"
    with pytest.raises(ValueError, match=message):
        fit(ppo(), batches(1), ckpt=tmp_path / "actor.ckpt", **MORE)
    with pytest.raises(ValueError, match=message):
        validated(ppo(), tmp_path / "actor.ckpt")


def test_another_optimizer_is_rejected(saved):
    _, path = saved
    with pytest.raises(ValueError, match="the critic was optimized by AdamW when the checkpoint was written, and now"):
        fit(ppo(critic_optimizer=partial(torch.optim.SGD, lr=0.1)), batches(1), ckpt=path, **MORE)


def test_optimizer_with_unsupported_state_is_rejected_before_any_model_is_built():
    module = ppo(critic_optimizer=ListedSGD)
    with pytest.raises(ValueError, match="ListedSGD keeps a list as 'steps'"):
        fit(module, batches(1), **MORE)
    assert not module.built


class WithMore(PPOModule):
    """A module with weights and a counter that belong to no role."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.head = nn.Linear(2, 3)
        self.register_buffer("count", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.count += 1


def test_other_weights_and_buffers_of_a_module_are_saved(tmp_path, saved):
    module = ppo(WithMore)
    trainer = fit(module, batches(2), max_steps=2, **MORE)
    trainer.save_checkpoint(tmp_path / "more.ckpt")
    rest = torch.load(manifest.verified(tmp_path / "more.ckpt") / "state.pt", weights_only=True)
    assert set(rest["state_dict"]) == {"head.weight", "head.bias", "count"}
    again = ppo(WithMore)
    fit(again, batches(4)[2:] * 2, ckpt=tmp_path / "more.ckpt", max_steps=3, **MORE)
    assert int(again.count) == 3
    assert torch.equal(again.head.weight, module.head.weight)
    with pytest.raises(ValueError, match="only the checkpoint has count: resume with the module and configuration"):
        fit(ppo(), batches(1), ckpt=tmp_path / "more.ckpt", **MORE)
    with pytest.raises(ValueError, match="only this run's module has count: resume with the module and configuration"):
        fit(ppo(WithMore, kl_reward=KLTerm(0.1)), batches(1), ckpt=saved[1], **MORE)


def test_file_of_another_strategy_is_rejected(tmp_path):
    fit(ppo(), batches(1), max_steps=1, max_epochs=-1).save_checkpoint(tmp_path / "plain.ckpt")
    assert (tmp_path / "plain.ckpt").is_file()
    with pytest.raises(ValueError, match=r"plain\.ckpt is a file, but a checkpoint is a folder"):
        fit(ppo(), batches(1), ckpt=tmp_path / "plain.ckpt", **MORE)


def test_removed_checkpoint_is_deleted(tmp_path):
    strategy = type("Alone", (ReshardableCheckpoints,), {"lightning_module": LightningModule()})()
    manifest.publish(manifest.begin(tmp_path / "old.ckpt"))
    strategy.remove_checkpoint(tmp_path / "old.ckpt")
    assert not (tmp_path / "old.ckpt").exists()
    strategy.remove_checkpoint(tmp_path / "old.ckpt")


@pytest.mark.parametrize("background", [False, True])
def test_non_finite_weight_is_reported_and_the_previous_checkpoint_is_kept(tmp_path, background):
    module, path = ppo(), tmp_path / "last.ckpt"
    trainer = fit(module, batches(2), max_steps=2, **MORE)
    trainer.save_checkpoint(path)
    with torch.no_grad():
        module.critic.lm.get_input_embeddings().weight[0, :3] = float("nan")
    with pytest.raises(
        FloatingPointError, match=r"3 values of .*embed_tokens\.weight of the critic are not finite after"
    ):
        trainer.save_checkpoint(path, storage_options=SaveOptions(background=background))
    assert manifest.verified(path).name == "v000001"
    trainer.strategy.optimizers[0].state[next(module.actor.parameters())]["exp_avg"].fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"optim\.state\..*\.exp_avg of the actor are not finite"):
        trainer.save_checkpoint(path)


def test_non_finite_model_is_not_exported(tmp_path):
    module = ppo()
    fit(module, batches(1), max_steps=1, **MORE)
    with torch.no_grad():
        module.actor.lm.get_output_embeddings().weight[1, 1] = float("inf")
    with pytest.raises(FloatingPointError, match="of the actor has values that are not finite: nothing was"):
        module.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_background_save_holds_the_state_of_its_start_and_raises_its_error_later(tmp_path, monkeypatch):
    module, path = ppo(), tmp_path / "last.ckpt"
    trainer = fit(module, batches(2), max_steps=2, **MORE)
    trainer.save_checkpoint(tmp_path / "now.ckpt")
    trainer.save_checkpoint(path, storage_options=SaveOptions(background=True))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    trainer.strategy.finish_saving()
    now, later = (manifest.verified(folder) for folder in (tmp_path / "now.ckpt", path))
    for file in sorted(now.rglob("*.safetensors")):
        ours, theirs = load_file(later / file.relative_to(now)), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    monkeypatch.setattr(manifest, "publish", lambda *args: (_ for _ in ()).throw(OSError("the disk is gone")))
    trainer.save_checkpoint(path, storage_options=SaveOptions(background=True))
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.strategy.finish_saving()
    trainer.strategy.finish_saving()  # raised once
    assert manifest.verified(path) == later


def test_interrupted_wait_leaves_the_background_save_to_the_next_wait(tmp_path, monkeypatch):
    trainer = fit(ppo(), batches(1), max_steps=1, **MORE)
    trainer.save_checkpoint(tmp_path / "last.ckpt", storage_options=SaveOptions(background=True))
    wait = background.futures.wait
    monkeypatch.setattr(background.futures, "wait", lambda running: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.strategy.finish_saving()
    monkeypatch.setattr(background.futures, "wait", wait)
    trainer.strategy.finish_saving()
    assert manifest.verified(tmp_path / "last.ckpt").name == "v000001"
