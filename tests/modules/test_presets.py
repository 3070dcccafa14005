"""Algorithms as changed defaults: in Python, in the signature that LightningCLI reads, and in subclasses."""

import inspect

import pytest

from lightning_rlhf import DAPOModule, GRPOModule, IPOModule, RLHFModule
from lightning_rlhf.extras.algorithms.preference_losses import IPOLoss
from lightning_rlhf.modules.algorithms import with_defaults
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, TokenMean
from lightning_rlhf.objectives.group_advantages import GRPO, RLOO
from lightning_rlhf.objectives.kl_controllers import KLTerm


def test_algorithm_has_its_defaults_and_those_of_its_base(tiny):
    module = GRPOModule(tiny)
    assert (module.advantages, module.kl_loss, module.aggregation) == (
        GRPO(),
        KLTerm(0.04, "k3"),
        SequenceMeanTokenMean(),
    )
    assert module.policy_loss == RLHFModule(tiny).policy_loss
    assert IPOModule(tiny).loss == IPOLoss()


def test_arguments_override_defaults_by_name_and_by_position(tiny):
    assert GRPOModule(tiny, advantages=RLOO()).advantages == RLOO()
    assert GRPOModule(tiny, None, None, RLOO()).advantages == RLOO()


def test_signature_has_all_arguments_with_defaults_as_in_a_configuration():
    parameters = inspect.signature(DAPOModule).parameters
    assert list(parameters) == list(inspect.signature(RLHFModule).parameters)
    assert parameters["policy_loss"].default == {
        "class_path": "lightning_rlhf.objectives.policy_losses.ClippedPolicyLoss",
        "init_args": {"clip_range_low": 0.2, "clip_range_high": 0.28},
    }
    assert parameters["minibatch_size"].default is None
    assert inspect.signature(GRPOModule).parameters["kl_loss"].default == KLTerm(0.04, "k3")


def test_subclass_of_an_algorithm_may_change_further_defaults(tiny):
    @with_defaults(aggregation=TokenMean(), minibatch_size=8)
    class Mine(GRPOModule):
        pass

    module = Mine(tiny)
    assert (module.aggregation, module.minibatch_size, module.advantages) == (TokenMean(), 8, GRPO())
    assert GRPOModule(tiny).takes_whole_steps


def test_default_without_an_argument_raises(tiny):
    with pytest.raises(TypeError, match="RLHFModule has no argument 'beta'"):
        with_defaults(beta=1.0)(RLHFModule)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        GRPOModule(tiny, beta=1.0)
