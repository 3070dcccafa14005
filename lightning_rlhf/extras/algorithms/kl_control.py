"""KLControl: adapts the KL coefficient to reach a target."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_rlhf.callbacks.loop.checks import check_module, last_step_of
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.kl_controllers import AdaptiveKL


class KLControl(Callback):
    """Keeps the KL to the reference near a target by changing the coefficient of ``kl_reward`` after each rollout.

    Use it with PPO if you know how far the policy may move, but not which coefficient gets you there. Checkpoints
    contain the coefficient.

    Args:
        controller: rule of the update.
    """

    def __init__(self, controller: AdaptiveKL) -> None:
        self.controller = controller
        self._restored: float | None = None
        self._coef = 0.0

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Raise if the module has no KL penalty to control."""
        if not hasattr(pl_module, "kl_reward"):
            check_module(self, pl_module, RLHFModule)
        if pl_module.kl_reward.coef <= 0:
            raise UsageError(
                f"KLControl needs a KL penalty in the reward: set kl_reward with a positive coef, got "
                f"{pl_module.kl_reward.coef}"
            )

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Restore the coefficient of the checkpoint."""
        if self._restored is not None:
            pl_module.kl_coef = self._restored
            self._restored = None
        self._coef = pl_module.kl_coef

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RLHFModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the coefficient from the KL over all ranks, unless only the critic was updated."""
        step = last_step_of(self, pl_module)
        if "actor" not in step.roles:
            return
        if step.kl_to_ref is None:
            raise RunError(f"KLControl needs the KL to the reference, but {type(pl_module).__name__} does not set it")
        count = torch.tensor(float(len(step.experience)), device=pl_module.device)
        responses = int(pl_module.data_ranks.sum(count))
        kl = float(torch.tensor(step.kl_to_ref))  # float32, like the logged value
        self._coef = pl_module.kl_coef = self.controller(pl_module.kl_coef, kl, responses)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"kl_coef": self._coef}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Store the coefficient until training starts."""
        self._restored = state_dict["kl_coef"]
