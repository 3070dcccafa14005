"""Weight pushes to an engine that swaps adapters: base weights once, then only adapters."""

from functools import partial

import pytest
import torch

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.lora import LoRA, is_adapter
from lightning_rlhf.rollout.engine import EngineTraits
from tests.stand_ins import ScriptedEngine, TinyModel

LORA = LoRA(rank=4, alpha=8)
NAMES = [name for name, _ in TinyModel().causal().lm.named_parameters()]


class Swapping(ScriptedEngine):
    """Records the weights and adapters that it receives."""

    traits = EngineTraits(swaps_adapters=True)
    differs = None

    def start(self, setup):
        super().start(setup)
        self.lora = setup.lora

    def update_weights(self, parameters, version):
        self.base = {name: tensor.clone() for name, tensor in parameters}
        self.calls.append(f"update_weights {version}")

    def update_adapters(self, parameters, version):
        self.adapters = {name: tensor.clone() for name, tensor in parameters}
        self.calls.append(f"update_adapters {version}")
        self.version = version

    def first_difference(self, parameters):
        return next(name for name, tensor in parameters if not torch.equal(tensor, self.adapters[name] * 0))


@pytest.fixture
def swapping():
    return Swapping(["a", "b"], CharacterTokenizer("abcdefg").load())


def test_base_weights_are_sent_once_and_adapters_before_every_rollout(run, swapping):
    made = run(loop={"engine": swapping}, model={"actor": TinyModel(lora=LORA)})
    made.fit()
    pushes = [call for call in swapping.calls if call.startswith("update")]
    assert pushes == ["update_weights 0", "update_adapters 0", "update_adapters 1"]
    assert swapping.lora == LORA
    assert list(swapping.base) == NAMES
    source = dict(TinyModel().causal().lm.named_parameters())
    assert all(torch.equal(swapping.base[name], source[name]) for name in NAMES)
    assert all(is_adapter(name) for name in swapping.adapters)
    assert any(tensor.any() for name, tensor in swapping.adapters.items() if ".lora_B." in name)  # of the second push


def test_second_run_with_the_same_loop_sends_the_base_weights_again(run, swapping):
    for _ in range(2):
        run(loop={"engine": swapping}, model={"actor": TinyModel(lora=LORA)}, trainer={"max_steps": 1}).fit()
    assert swapping.calls.count("update_weights 0") == 2


def test_lost_adapter_is_reported_by_name(run, swapping):
    sgd = partial(torch.optim.SGD, lr=5.0)
    made = run(
        loop={"engine": swapping, "check_rows": 2, "max_logprob_diff": 1e-9},
        model={"actor": TinyModel(lora=LORA), "optimizer": sgd},
    )
    with pytest.raises(
        RuntimeError, match=r"the first parameter that differs is model.layers.0.self_attn.q_proj.lora_A"
    ):
        made.fit()
