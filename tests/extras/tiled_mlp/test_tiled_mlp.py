"""Feed-forward layers in pieces: equal results and gradients, less memory, models without such layers."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rlhf import FromConfig
from lightning_rlhf.extras.tiled_mlp.tiling import tile_mlps
from tests.models.architectures import tiny
from tests.stand_ins import TINY_LLAMA

IDS = torch.randint(3, 11, (2, 13), generator=torch.Generator().manual_seed(1))
KINDS = pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "qwen3"])


def loss_and_gradients(lm, ids=IDS):
    lm.zero_grad()
    loss = lm(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum()
    loss.backward()
    return loss, [parameter.grad.clone() for parameter in lm.parameters()]


@pytest.mark.quick_cases(2)
@KINDS
def test_results_and_gradients_are_equal_up_to_rounding(kind):
    lm = FromConfig(tiny(kind), seed=0).causal().lm.double().train()
    expected = loss_and_gradients(lm)
    tile_mlps(lm, 4)
    result = loss_and_gradients(lm)
    for ours, theirs in zip([result[0], *result[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(lm(input_ids=IDS, use_cache=False).logits.logsumexp(-1).sum(), expected[0])


def test_inner_activations_are_not_saved():
    def saved(lm, ids):
        sizes = []
        with saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
            lm(input_ids=ids, use_cache=False).logits.sum()
        return sum(sizes)

    lm = FromConfig(TINY_LLAMA | {"intermediate_size": 512}, seed=0).causal().lm.train()
    ids = torch.randint(3, 11, (1, 256))
    before = saved(lm, ids)
    tile_mlps(lm, 32)
    assert saved(lm, ids) < 0.5 * before


def test_short_rows_are_computed_at_once():
    lm = FromConfig(TINY_LLAMA, seed=0).causal().lm
    expected = lm(input_ids=IDS, use_cache=False).logits
    tile_mlps(lm, 64)
    assert torch.equal(lm(input_ids=IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("kind", ["mixtral", "mamba"])
def test_models_without_plain_layers_are_rejected(kind):
    with pytest.raises(ValueError, match=r"^mlp_tokens: \w+ForCausalLM has no plain feed-forward layers named mlp, "):
        tile_mlps(FromConfig(tiny(kind), seed=0).causal().lm, 8)
