"""AdamW with weight decay on matrices only, compared with torch's AdamW with explicit groups."""

import pytest
import torch

from lightning_rlhf.modules.optimizers import MatrixDecayAdamW
from tests.stand_ins import TinyModel


def named_parameters():
    return dict(TinyModel().causal().lm.named_parameters())


def test_norms_and_biases_do_not_decay():
    ours, theirs = named_parameters(), named_parameters()
    vectors = [name for name in theirs if "norm" in name or name.endswith("bias")]
    assert 0 < len(vectors) < len(theirs)
    groups = [
        {"params": [their for name, their in theirs.items() if name not in vectors], "weight_decay": 0.5},
        {"params": [theirs[name] for name in vectors], "weight_decay": 0.0},
    ]
    optimizers = [MatrixDecayAdamW(ours.values(), lr=0.1, weight_decay=0.5), torch.optim.AdamW(groups, lr=0.1)]
    before = {name: our.detach().clone() for name, our in ours.items()}
    for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = torch.full_like(parameter, 0.01 * number)
        optimizer.step()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
    first = next(iter(ours))  # without a gradient only the decay changes it
    torch.testing.assert_close(ours[first], before[first] * (1 - 0.1 * 0.5))


def test_model_with_parameters_of_one_kind_has_one_group():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    assert len(MatrixDecayAdamW([matrix]).param_groups) == 1
    assert MatrixDecayAdamW([vector], weight_decay=0.5).param_groups[0]["weight_decay"] == 0.0
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        MatrixDecayAdamW([])


def test_shapes_of_parameters_emptied_by_zero_are_used():
    emptied = torch.nn.Parameter(torch.ones(0))
    emptied.ds_shape = torch.Size([3, 2])
    assert MatrixDecayAdamW([emptied], weight_decay=0.5).param_groups[0]["weight_decay"] == 0.5
