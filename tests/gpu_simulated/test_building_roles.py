"""Roles are built in host memory under every strategy, although Lightning sets the GPU as default device."""

import hashlib

import pytest
import torch
import transformers.integrations.accelerate
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_rlhf import SFTModule
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.strategies.ddp import RLHFDDPStrategy
from lightning_rlhf.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.stand_ins import TinyModel, quiet_trainer

CUDA = torch.device("cuda", 0)
STRATEGIES = [SingleDeviceStrategy, RLHFSingleDeviceStrategy, RLHFDDPStrategy, RLHFFSDPStrategy, RLHFDeepSpeedStrategy]


@pytest.fixture(params=STRATEGIES, ids=lambda kind: kind.__name__)
def built(request, monkeypatch):
    """Build a module's roles in the context that Lightning opens on a GPU; returns the module."""

    def built(source):
        strategy = request.param(**({"stage": 1} if request.param is RLHFDeepSpeedStrategy else {}))
        trainer = quiet_trainer(strategy=SingleDeviceStrategy(torch.device("cpu")))
        module = SFTModule(source)
        trainer.strategy.connect(module)
        module.trainer = trainer
        monkeypatch.setattr(request.param, "root_device", CUDA)
        strategy._precision_plugin = trainer.precision_plugin
        with strategy.tensor_init_context():
            module.configure_model()
        return module

    return built


def digest(module):
    values = [parameter.detach().numpy().tobytes() for parameter in module.actor.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def test_same_seed_gives_the_same_weights_on_any_device(built):
    module = built(TinyModel(seed=3, lora=LoRA(rank=2, alpha=4)))
    assert {parameter.device.type for parameter in module.actor.parameters()} == {"cpu"}
    on_cpu = SFTModule(TinyModel(seed=3, lora=LoRA(rank=2, alpha=4)))
    on_cpu.configure_model()
    assert digest(module) == digest(on_cpu)


def test_saved_model_loads_without_accelerate(built, monkeypatch, tmp_path):
    TinyModel(seed=1).causal().lm.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.integrations.accelerate, "is_accelerate_available", lambda: False)
    module = built(Pretrained(str(tmp_path)))
    on_cpu = SFTModule(Pretrained(str(tmp_path)))
    on_cpu.configure_model()
    assert digest(module) == digest(on_cpu)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
def test_gpu_generators_are_not_seeded(lora, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    TinyModel(lora=lora).causal()
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), before)
