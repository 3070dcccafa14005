"""Activations in host memory: the same gradients, and weights that stay where they are."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rlhf import FromConfig
from lightning_rlhf.strategies.activations import ActivationOffload
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.stand_ins import TINY_LLAMA

IDS = torch.randint(3, 11, (2, 40), generator=torch.Generator().manual_seed(1))


def gradients(lm, context):
    lm.zero_grad()
    with context:
        loss = lm(input_ids=IDS, use_cache=False).logits.sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in lm.parameters()]


class Counted(ActivationOffload):
    """Records the tensors that are copied, and the others."""

    def __init__(self, lm):
        self.copied, self.others = [], []
        super().__init__(torch.device("cpu"), lm.parameters())

    def _store(self, tensor):
        stored = super()._store(tensor)
        (self.copied if isinstance(stored, tuple) else self.others).append(tensor)
        return stored


def test_gradients_are_the_same_bits_and_weights_are_not_copied():
    lm = FromConfig(TINY_LLAMA, seed=0).causal().lm.train()
    context = Counted(lm)
    ours = gradients(lm, context)
    theirs = gradients(lm, saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    weights = {parameter.untyped_storage().data_ptr() for parameter in lm.parameters()}
    assert context.copied
    assert not [tensor for tensor in context.copied if tensor.untyped_storage().data_ptr() in weights]
    assert {tensor.untyped_storage().data_ptr() for tensor in context.others} & weights


def test_casts_of_weights_by_autocast_are_not_copied():
    lm = FromConfig(TINY_LLAMA | {"num_hidden_layers": 1}, seed=0).causal().lm.train()
    context = Counted(lm)
    with torch.autocast("cpu", torch.bfloat16):
        gradients(lm, context)
    shapes = {shape for weight in lm.parameters() for shape in (weight.shape, weight.shape[::-1])}
    assert context.copied
    assert not [tensor for tensor in context.copied if tensor.shape in shapes]
    assert [tensor for tensor in context.others if tensor.shape in shapes and tensor.dtype == torch.bfloat16]


def test_option_of_the_strategy_has_no_effect_on_a_cpu():
    strategy = RLHFSingleDeviceStrategy(activation_offload=True, mlp_tokens=16)
    assert (strategy.activation_offload, strategy.mlp_tokens) == (True, 16)
