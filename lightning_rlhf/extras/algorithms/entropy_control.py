"""EntropyControl: adapts the entropy coefficient so that the policy's entropy does not fall below a target."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_rlhf.callbacks.loop.checks import check_module
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.modules.rlhf import RLHFModule


class EntropyControl(Callback):
    """Keeps the policy's entropy near a target by changing ``ent_coef`` of the module after each step.

    Use it when ``policy/entropy`` falls although the reward could still rise, and no fixed ``ent_coef`` fits the run.

    With the mean entropy H of a step, c becomes c + delta where H < target, else c - delta, within [minimum, maximum].
    The next step's coefficient is c where H <= target, else 0. The first c is the module's ``ent_coef``. Checkpoints
    contain it.
    See "Skywork Open Reasoner 1 Technical Report", He et al. 2025, section 4.2.

    Args:
        target: entropy to keep, nats per token, positive.
        delta: change of the coefficient in a step, positive.
        minimum: least coefficient, at least 0.
        maximum: largest coefficient.
    """

    def __init__(self, target: float, delta: float = 0.005, minimum: float = 0.0, maximum: float = 1.0) -> None:
        for name, value in (("target", target), ("delta", delta)):
            if not value > 0:
                raise UsageError(f"{name} of EntropyControl must be positive, got {value}")
        if not 0 <= minimum <= maximum:
            raise UsageError(f"EntropyControl needs 0 <= minimum <= maximum, got {minimum} and {maximum}")
        self.target = target
        self.delta = delta
        self.minimum = minimum
        self.maximum = maximum
        self._coefs: dict[str, float] = {}  # c, and that of the next step

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Raise if the module has no entropy bonus."""
        if not hasattr(pl_module, "ent_coef"):
            check_module(self, pl_module, RLHFModule)
        if not pl_module.has_entropy_bonus:
            raise UsageError(
                f"EntropyControl needs a loss with an entropy bonus, which {type(pl_module).__name__} does not have: "
                f"remove EntropyControl"
            )

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Restore the coefficients of the checkpoint."""
        self._coefs = {"c": pl_module.ent_coef, "next": pl_module.ent_coef} | self._coefs
        pl_module.ent_coef = self._coefs["next"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RLHFModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the coefficient from the entropy over all ranks, unless only the critic was updated."""
        pl_module.log_step("entropy", {"policy/entropy_coef": pl_module.ent_coef})
        entropy = float(trainer.callback_metrics.get("policy/entropy", math.nan))
        if math.isnan(entropy):
            return
        change = self.delta if entropy < self.target else -self.delta
        coef = min(max(self._coefs["c"] + change, self.minimum), self.maximum)
        pl_module.ent_coef = coef if entropy <= self.target else 0.0
        self._coefs = {"c": coef, "next": pl_module.ent_coef}

    def state_dict(self) -> dict[str, float]:
        """Return the coefficients."""
        return self._coefs

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Store the coefficients until training starts."""
        self._coefs = state_dict
