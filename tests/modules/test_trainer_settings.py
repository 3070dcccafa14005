"""Settings of automatic optimization are rejected in Python with the setting to use instead."""

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_rlhf import PPOModule, SFTModule
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
