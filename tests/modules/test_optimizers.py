"""AdamW with weight decay on matrices only, and Muon with AdamW, compared with explicit formulas."""

import copy

import pytest
import torch

from lightning_rlhf import FromConfig
from lightning_rlhf.modules.optimizers import MatrixDecayAdamW, MuonAdamW, mark_parameters_of_adamw
from lightning_rlhf.strategies.checkpoints.role_state import check_optimizer
from tests.models.architectures import tiny
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


def muon_parameters():
    model = TinyModel().causal()
    mark_parameters_of_adamw(model)
    return {name: parameter for name, parameter in model.lm.named_parameters() if parameter.requires_grad}


def with_gradients(parameters):
    generator = torch.Generator().manual_seed(3)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def orthogonalised(matrix):
    """Take five Newton-Schulz steps as in Jordan et al. 2024, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm()
    for _ in range(5):
        square = wide @ wide.T
        wide = a * wide + (b * square + c * square @ square) @ wide
    return (wide if x.shape[0] <= x.shape[1] else wide.T).float()


def test_hidden_matrices_step_by_muon_and_all_others_by_adamw():
    ours, before = muon_parameters(), muon_parameters()
    with_gradients(ours)
    MuonAdamW(ours.values(), lr=0.1, weight_decay=0.5).step()
    hidden = [name for name in ours if ".layers." in name and ours[name].ndim == 2]
    assert 0 < len(hidden) < len(ours)
    for name, parameter in ours.items():
        start, gradient = before[name].detach(), parameter.grad
        decay = 0.5 if parameter.ndim == 2 else 0.0
        if name in hidden:  # Nesterov's momentum of the first step is a multiple of the gradient
            step = 0.2 * max(parameter.shape) ** 0.5 * orthogonalised(gradient)
            torch.testing.assert_close(parameter.detach(), start * (1 - 0.1 * decay) - 0.1 * step, atol=5e-3, rtol=0)
            values = torch.linalg.svdvals((start * (1 - 0.1 * decay) - parameter.detach()).T)
            assert values.median() > 0.5 * values.max()  # those of the gradient are far apart
        else:
            expected = start * (1 - 0.1 * decay) - 0.1 * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(parameter.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "mamba", "gemma2", "mixtral"])
def test_only_weights_of_hidden_layers_step_by_muon_in_other_architectures(kind):
    model = FromConfig(tiny(kind)).causal()
    mark_parameters_of_adamw(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = MuonAdamW(model.parameters(), lr=0.1)
    by_muon = [names[id(each)] for group in optimizer.param_groups if "ns_steps" in group for each in group["params"]]
    others = set(names.values()) - set(by_muon)
    assert by_muon
    assert all(name.endswith("weight") for name in by_muon)
    assert not [name for name in by_muon if any(part in name for part in ("embed", "wte", "wpe", "head", "norm"))]
    assert any(part in name for name in others for part in ("embed", "wte"))
    if kind == "mamba":
        assert [name for name in others if name.endswith("A_log")]


def test_state_is_restored_to_the_bit_and_schedules_reach_both_parts():
    def steps(parameters, optimizer, count):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for _ in range(count):
            with_gradients(parameters)
            optimizer.step()
            schedule.step()
        return optimizer

    ours, theirs = muon_parameters(), muon_parameters()
    one = steps(ours, MuonAdamW(ours.values(), lr=0.01), 2)
    assert {group["lr"] for group in one.param_groups} == {0.0025}
    assert {key for state in one.state.values() for key in state} == {
        "momentum_buffer", "step", "exp_avg", "exp_avg_sq"
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    other = MuonAdamW(theirs.values(), lr=1.0)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for parameters, optimizer in ((ours, one), (theirs, other)):
        with_gradients(parameters)
        optimizer.step()
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.items())


def test_flat_pieces_of_matrices_are_refused():
    with pytest.raises(ValueError, match=r"MuonAdamW needs whole matrices, .* use rlhf_fsdp or rlhf_ddp"):
        check_optimizer(MuonAdamW, torch.device("cpu"), keeps_matrices=False)
    check_optimizer(MuonAdamW, torch.device("cpu"))
    check_optimizer(torch.optim.AdamW, torch.device("cpu"), keeps_matrices=False)
