"""EntropyControl: the coefficient follows the entropy and is restored from a checkpoint."""

from types import SimpleNamespace

import pytest

from lightning_rlhf import DistillationModule, OnlineDPOModule
from lightning_rlhf.callbacks import EntropyControl
from tests.stand_ins import TinyModel


def a_module(coef=0.0):
    logged = []
    log_step = lambda part, metrics: logged.append(metrics)  # noqa: E731
    return SimpleNamespace(ent_coef=coef, has_entropy_bonus=True, logged=logged, log_step=log_step)


def step(control, module, entropy):
    trainer = SimpleNamespace(callback_metrics={} if entropy is None else {"policy/entropy": entropy})
    control.on_train_batch_end(trainer, module, None, None, 0)


def begun(module, state=None, **options):
    control = EntropyControl(target=0.2, delta=0.01, **options)
    control.setup(None, module, "fit")
    if state is not None:
        control.load_state_dict(state)
    control.on_train_start(None, module)
    return control


def test_coefficient_rises_below_the_target_and_is_0_above_it():
    module = a_module()
    control = begun(module)
    applied = []
    for entropy in (0.1, 0.1, 0.3, 0.2, 0.1, 0.1):
        step(control, module, entropy)
        applied.append(module.ent_coef)
    # c: 0.01, 0.02, 0.01 (above: not applied), 0.0 (at the target c falls, and is applied), 0.01, 0.02
    assert applied == pytest.approx([0.01, 0.02, 0.0, 0.0, 0.01, 0.02], abs=1e-12)
    logged = [metrics["policy/entropy_coef"] for metrics in module.logged]
    assert logged == pytest.approx([0.0, *applied[:-1]], abs=1e-12)


def test_coefficient_stays_within_its_bounds():
    module = a_module(0.03)
    control = begun(module, minimum=0.02, maximum=0.035)
    for _ in range(3):
        step(control, module, 0.1)
    assert module.ent_coef == pytest.approx(0.035)
    for _ in range(5):
        step(control, module, 0.9)
    step(control, module, 0.15)
    assert module.ent_coef == pytest.approx(0.03)  # from 0.02


def test_resumed_run_continues_like_an_uninterrupted_run():
    undisturbed, resumed = a_module(), a_module()
    control = begun(undisturbed)
    for entropy in (0.1, 0.1, 0.9):
        step(control, undisturbed, entropy)
    again = begun(resumed, control.state_dict())
    assert resumed.ent_coef == undisturbed.ent_coef == 0.0
    for entropy in (0.1, 0.19, 0.3, 0.1):
        step(control, undisturbed, entropy)
        step(again, resumed, entropy)
    assert resumed.ent_coef == undisturbed.ent_coef > 0


@pytest.mark.parametrize("entropy", [None, float("nan")])
def test_step_without_an_update_of_the_actor_changes_nothing(entropy):
    module = a_module(0.3)
    step(begun(module), module, entropy)
    assert module.ent_coef == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "target of EntropyControl must be positive, got 0.0"),
        ({"target": 0.2, "delta": 0.0}, "delta of EntropyControl must be positive, got 0.0"),
        ({"target": 0.2, "minimum": 0.5, "maximum": 0.1}, "EntropyControl needs 0 <= minimum <= maximum"),
    ],
)
def test_invalid_settings_raise(options, message):
    with pytest.raises(ValueError, match=message):
        EntropyControl(**options)


@pytest.mark.parametrize("kind", [DistillationModule, OnlineDPOModule])
def test_module_whose_loss_has_no_entropy_bonus_raises(kind):
    options = {"teacher": TinyModel()} if kind is DistillationModule else {}
    with pytest.raises(ValueError, match=f"needs a loss with an entropy bonus, which {kind.__name__} does not have"):
        EntropyControl(target=0.2).setup(None, kind(TinyModel(), **options), "fit")
