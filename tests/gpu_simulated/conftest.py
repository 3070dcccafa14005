"""Runs of every module with all default callbacks on a simulated GPU."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_rlhf.callbacks.defaults import complete
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.gpu_simulated.pretend import CUDA, pretended_cuda
from tests.stand_ins import quiet_trainer


class OnPretendedGPU(RLHFSingleDeviceStrategy):
    """A simulated GPU without autograd: losses have no graph, and all gradients are zeros."""

    root_device = CUDA
    forwards = 0  # of any role

    def role(self, name):
        self.forwards += 1
        return super().role(name)

    def accumulate(self, name, sync):
        return torch.no_grad()

    def backward_role(self, name, loss):
        assert loss.device == CUDA
        for parameter in getattr(self.module, name).parameters():
            assert parameter.device == CUDA
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """Fit a module on the simulated GPU for two steps; returns the waits of the host, and the forward passes."""
    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "pretended GPU")
    monkeypatch.chdir(tmp_path)

    def on_gpu(module, data, *callbacks, **options):
        trainer = quiet_trainer(
            strategy=OnPretendedGPU(), callbacks=complete(callbacks), default_root_dir=tmp_path, max_steps=2, **options
        )
        step, strategy = module.training_step, trainer.strategy
        forwards = []
        with pretended_cuda() as waits:

            def counted(*batch):
                for role in (*module.trained_roles, *module.frozen_roles):
                    assert {tensor.device for tensor in getattr(module, role).state_dict().values()} == {CUDA}
                waits.on, before = True, strategy.forwards
                try:
                    return step(*batch)
                finally:
                    waits.on = False
                    forwards.append(strategy.forwards - before)

            module.training_step = counted
            trainer.fit(module, datamodule=data)
        assert trainer.global_step == 2
        return Counter(waits), sum(forwards)

    return on_gpu
