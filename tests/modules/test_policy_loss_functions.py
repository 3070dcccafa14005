"""A plain function, or its reference, as policy loss."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from lightning_rlhf import RLHFModule
from lightning_rlhf.objectives.base import PolicyLoss
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from tests.stand_ins import TinyModel, fit, responses, rollout_of

SGD = partial(torch.optim.SGD, lr=0.1)


def plain_ratio(tokens):
    return -tokens.advantages * tokens.log_ratio.exp()


def test_function_as_policy_loss_has_the_gradient_of_the_equivalent_class(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class PlainRatio(PolicyLoss):
        def token_losses(self, tokens):
            return plain_ratio(tokens), {}

    (tmp_path / "losses.py").write_text("def same(tokens):\n    return -tokens.advantages * tokens.log_ratio.exp()\n")
    monkeypatch.chdir(tmp_path)
    weights = []
    for loss in (PlainRatio(), plain_ratio, "losses.py:same"):
        module = RLHFModule(TinyModel(), policy_loss=loss, minibatch_size=4, optimizer=SGD)
        fit(module, [rollout_of(responses(4, seed=5))])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.actor.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda tokens: tokens.advantages.mean(), r"the loss of each token, shape \(4, \d+\), got shape \(\)"),
        (lambda tokens: 1.0, "must return a tensor with the loss of each token.*got float"),
        (lambda tokens: (tokens.log_ratio, 1.0), "diagnostics of <lambda> must be a dictionary of tensors, got float"),
        (lambda tokens: tokens.advantages, "have no gradient: compute them from tokens.logprobs or tokens.log_ratio"),
        (3, "policy_loss must be a policy loss, a function or its reference, got 3"),
        (ClippedPolicyLoss, "policy_loss: ClippedPolicyLoss is a class: set class_path to it, or pass an object of it"),
        ("losses_that_do_not_exist.py:loss", "file not found: losses_that_do_not_exist.py"),
    ],
    ids=["one number for all", "no tensor", "no dictionary", "no gradient", "no function", "class", "no file"],
)
def test_function_that_is_not_a_policy_loss_raises(loss, message):
    def train():
        module = RLHFModule(TinyModel(), policy_loss=loss, minibatch_size=4, optimizer=SGD)
        fit(module, [rollout_of(responses(4, seed=5))])

    with pytest.raises(ValueError, match=message):
        train()
