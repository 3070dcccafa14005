"""Linear layers of roles on a CPU use the faster products; the model is otherwise unchanged."""

import copy

import pytest
import torch
from torch import nn

from lightning_rlhf import SFTModule
from lightning_rlhf.functional import products
from lightning_rlhf.functional.products import Linear, use_faster_products
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.types import SequenceBatch
from tests.stand_ins import TINY_LLAMA, fit

WIDE = {**TINY_LLAMA, "hidden_size": 64, "intermediate_size": 128}  # matrices that are large enough for oneDNN


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)], ids=["whole", "LoRA"])
def test_log_probs_gradients_and_names_do_not_change(lora, monkeypatch):
    model = FromConfig(WIDE, seed=1, lora=lora).causal()
    changed = copy.deepcopy(model)
    use_faster_products(changed)
    monkeypatch.setattr(products, "_has_onednn", lambda: True)
    ids = torch.randint(0, 11, (2, 9))
    index = torch.arange(8).expand(2, -1)
    results = []
    for role in (model, changed):
        scores = role(ids, index, ids[:, 1:], torch.ones(2, 8, dtype=torch.bool))
        scores.logprobs.sum().backward()
        results.append([scores.logprobs, *(each.grad for each in role.parameters() if each.requires_grad)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert changed.state_dict().keys() == model.state_dict().keys()
    assert any(type(each) is Linear for each in changed.modules())


def test_subclasses_of_linear_layers_are_not_replaced():
    model = nn.Sequential(nn.Linear(2, 2), nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2))
    use_faster_products(model)
    assert [type(each) for each in model] == [Linear, nn.modules.linear.NonDynamicallyQuantizableLinear]


def test_roles_of_a_run_on_a_cpu_have_these_layers():
    module = SFTModule(FromConfig(WIDE, seed=1))
    ids = torch.randint(0, 11, (2, 9))
    fit(module, [SequenceBatch(ids, torch.tensor([9, 9]), torch.ones(2, 9).bool())])
    assert nn.Linear not in {type(each) for each in module.modules()}
