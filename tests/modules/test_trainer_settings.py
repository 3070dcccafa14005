"""Settings of automatic optimization are rejected in Python with the setting to use instead."""

import pytest
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint

from lightning_rlhf import PPOModule, SFTModule
from lightning_rlhf.modules.trainer_settings import check_trainer
from tests.stand_ins import TinyModel, quiet_trainer


@pytest.mark.parametrize("kind", [PPOModule, SFTModule])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_clip_val": 1.0}, "trainer.gradient_clip_val is 1.0, but .* set model.init_args.max_grad_norm"),
        (
            {"accumulate_grad_batches": 2},
            "trainer.accumulate_grad_batches is 2, but .*micro_batch_tokens",
        ),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "GradientAccumulationScheduler needs automatic"),
    ],
    ids=["clipping", "accumulation", "schedule of accumulation"],
)
def test_settings_of_automatic_optimization_raise_before_a_model_is_built(kind, settings, message):
    module = kind(TinyModel())
    with pytest.raises(ValueError, match=message):
        quiet_trainer(**settings).fit(module, [])
    assert not module.built


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_direction_of_the_library_s_metrics_is_checked_and_that_of_others_is_a_line(kind, caplog):
    with pytest.raises(ValueError, match=r"monitors reward/mean with mode: min, but .* its maximum: set mode: max"):
        check_trainer({"callbacks": [kind(monitor="reward/mean", mode="min")]})
    check_trainer({"callbacks": [kind(monitor="reward/mean", mode="max")]})
    assert caplog.text == ""
    check_trainer({"callbacks": [kind(monitor="reward/length", mode="min")]})
    assert "monitors reward/length with mode: min; if its best value is its maximum, set mode: max" in caplog.text
