"""Frozen models and optimizer states move to host memory while they are not used, on a simulated GPU."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import DPOModule, PPOModule
from lightning_rlhf.callbacks.defaults import complete
from lightning_rlhf.compat import optimizer_at
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.strategies import idle
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.gpu_simulated.conftest import OnPretendedGPU
from tests.gpu_simulated.pretend import CUDA, pretended_cuda
from tests.gpu_simulated.test_devices import ADAM, LEARNING, pairs, prompts, rollouts
from tests.stand_ins import TinyModel, fit, quiet_trainer, responses, rollout_of

CPU = torch.device("cpu")


def ppo(**options):
    return PPOModule(
        TinyModel(),
        ref=TinyModel(seed=2),
        critic=TinyModel(seed=3),
        reward_model=TinyModel(seed=5),
        kl_reward=KLTerm(coef=0.1),
        optimizer=ADAM,
        critic_optimizer=ADAM,
        minibatch_size=4,
        micro_batch_tokens=32,
        **options,
    )


def devices(role):
    return {tensor.device for tensor in (*role.parameters(), *role.buffers())}


def moment_devices(module, *names):
    states = [optimizer_at(module, module.trained_roles.index(name)).state for name in names]
    return {values["exp_avg"].device for state in states for values in state.values()}


class Watched(OnPretendedGPU):
    """Records which models are on the GPU in each forward pass, and the optimizer states at each step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.on_gpu, self.states_at_step = set(), set()

    def role(self, name):
        model = super().role(name)
        names = (*self.module.trained_roles, *self.module.frozen_roles)
        self.on_gpu.add((name, *(other for other in names if devices(getattr(self.module, other)) == {CUDA})))
        return model

    def accumulate(self, name, sync):
        super().accumulate(name, sync)
        return torch.no_grad()

    def step_role(self, name):
        super().step_role(name)
        self.states_at_step |= moment_devices(self.module, name)


class AtGeneration(Callback):
    """Records where frozen models and optimizer states are when responses are generated."""

    def __init__(self):
        self.frozen, self.moments = set(), set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.frozen |= {device for name in pl_module.frozen_roles for device in devices(getattr(pl_module, name))}
        self.moments |= moment_devices(pl_module, "actor", "critic")


def swap(tensor, data):  # .data of a tensor on the pretended device cannot be set
    new = torch.nn.Parameter(data, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else data
    torch.utils.swap_tensors(tensor, new)


@pytest.mark.slow
def test_only_models_in_use_are_on_the_gpu(on_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(idle, "set_data", swap)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    strategy, generation = Watched(offload_idle=True), AtGeneration()
    trainer = quiet_trainer(
        strategy=strategy, callbacks=complete([rollouts(), generation]), default_root_dir=tmp_path, max_steps=3
    )
    with pretended_cuda():
        trainer.fit(ppo(), datamodule=prompts())
    trained = ("actor", "critic")
    assert strategy.on_gpu >= {("ref", *trained, "ref"), ("reward_model", *trained, "reward_model")}
    assert not [names for names in strategy.on_gpu if {"ref", "reward_model"} <= set(names)]
    assert strategy.states_at_step == {CUDA}
    assert generation.frozen == {CPU}
    assert generation.moments == {CPU}


@pytest.mark.slow
def test_offloading_does_not_change_results(tmp_path):
    batches = [rollout_of(responses(8, seed)) for seed in range(3)]
    saved, offloaded = ppo(), ppo()
    fit(saved, batches, default_root_dir=tmp_path, strategy=RLHFSingleDeviceStrategy())
    fit(offloaded, batches, default_root_dir=tmp_path, strategy=RLHFSingleDeviceStrategy(offload_idle=True))
    for (name, one), other in zip(saved.named_parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_validation_without_training_needs_no_optimizer(tmp_path):
    trainer = quiet_trainer(
        strategy=RLHFSingleDeviceStrategy(offload_idle=True), callbacks=[rollouts()], default_root_dir=tmp_path
    )
    trainer.validate(ppo(), datamodule=prompts(), verbose=False)
    assert "val/score_greedy" in trainer.callback_metrics


def test_module_that_uses_its_reference_in_every_update_is_rejected(tmp_path):
    module = DPOModule(TinyModel(), ref=TinyModel(seed=1), **LEARNING)
    trainer = quiet_trainer(strategy=RLHFSingleDeviceStrategy(offload_idle=True), default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"DPOModule uses its reference in every micro-batch: set offload_idle"):
        trainer.fit(module, datamodule=pairs())
