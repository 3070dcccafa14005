"""KLControl: the coefficient is updated after each rollout and restored from a checkpoint."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_rlhf.callbacks import KLControl
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.modules.rlhf import TrainedStep
from lightning_rlhf.objectives.kl_controllers import AdaptiveKL, KLTerm

RULE = AdaptiveKL(target=2.0, horizon=10)


def a_module(coef=0.1):
    return SimpleNamespace(
        kl_reward=KLTerm(coef=coef),
        kl_coef=coef,
        last_step=TrainedStep([None] * 4, ("actor",), actor_updates=1, kl_to_ref=None, times={}),
        device=torch.device("cpu"),
        data_ranks=DataRanks(),
    )


def step(control, module, kl, ranks=1):
    module.data_ranks.sum = lambda count: ranks * count
    module.last_step = replace(module.last_step, kl_to_ref=kl)
    control.on_train_batch_end(None, module, None, None, 0)


def begun(module, state=None):
    control = KLControl(RULE)
    control.setup(None, module, "fit")
    if state is not None:
        control.load_state_dict(state)
    control.on_train_start(None, module)
    return control


def test_coefficient_follows_the_rule_for_the_responses_of_all_ranks():
    module = a_module()
    control = begun(module)
    step(control, module, 4.0, ranks=2)
    # kl is twice the target, clipped to a fifth more, times 8 of 10 responses
    assert module.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 0.8), rel=1e-12)


def test_second_fit_continues_with_the_coefficient_of_the_first():
    module = a_module()
    control = begun(module, {"kl_coef": 0.3})
    step(control, module, 4.0)
    coef = module.kl_coef
    control.on_train_start(None, module)
    assert module.kl_coef == coef != 0.3


def test_resumed_run_continues_like_an_uninterrupted_run():
    measured = [4.0, 0.3, 2.2, 1.9, 7.0]
    undisturbed, resumed = a_module(), a_module()
    control = begun(undisturbed)
    for kl in measured[:2]:
        step(control, undisturbed, kl)
    again = begun(resumed, control.state_dict())
    assert resumed.kl_coef == undisturbed.kl_coef
    for kl in measured[2:]:
        step(control, undisturbed, kl)
        step(again, resumed, kl)
    assert resumed.kl_coef == undisturbed.kl_coef != 0.1


def test_module_without_kl_to_the_reference_raises():
    module = a_module()
    with pytest.raises(RuntimeError, match="KLControl needs the KL to the reference"):
        begun(module).on_train_batch_end(None, module, None, None, 0)


def test_training_step_without_recorded_results_raises():
    module = a_module()
    module.last_step = None
    with pytest.raises(RuntimeError, match="KLControl needs the results of the step, but training_step of"):
        begun(module).on_train_batch_end(None, module, None, None, 0)


def test_checkpoint_before_the_first_step_holds_the_configured_coefficient():
    assert begun(a_module(0.3)).state_dict() == {"kl_coef": 0.3}


def test_module_without_kl_in_the_reward_raises():
    with pytest.raises(ValueError, match=r"set kl_reward with a positive coef, got 0\.0"):
        KLControl(RULE).setup(None, a_module(0.0), "fit")


def test_coefficient_does_not_change_while_only_the_critic_trains():
    module = a_module()
    module.last_step = replace(module.last_step, roles=("critic",))
    step(begun(module), module, kl=0.0)
    assert module.kl_coef == 0.1
