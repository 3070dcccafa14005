"""Callbacks that use the roles of a module raise a clear error for other modules."""

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_rlhf.callbacks import Console, HFExport, KLControl, RolloutLog, RunState, Throughput
from lightning_rlhf.objectives.kl_controllers import AdaptiveKL
from tests.stand_ins import quiet_trainer


@pytest.mark.parametrize(
    ("callback", "kind"),
    [
        (Console(), "RoleModule"),
        (Throughput(), "RoleModule"),
        (HFExport(), "RoleModule"),
        (RunState(), "RoleModule"),
        (RolloutLog(), "RLHFModule"),
        (KLControl(AdaptiveKL(target=1.0, horizon=10)), "RLHFModule"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_unsupported_module_raises_before_training(callback, kind, tmp_path):
    trainer = quiet_trainer(callbacks=[callback], default_root_dir=tmp_path, max_steps=1)
    message = rf"{type(callback).__name__} needs a lightning_rlhf {kind} \(.*\), got BoringModel: remove the"
    with pytest.raises(ValueError, match=message):
        trainer.fit(BoringModel())
