"""FollowingReference: the reference becomes a mean of itself and the actor, every few steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rlhf.callbacks.loop.checks import check_module
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.ranges import check_range

log = logging.getLogger(__name__)
_REF, _ACTOR = "ref", "actor"
_LEAST_IN_BFLOAT16 = 0.1  # a smaller part of the difference is mostly lost to rounding


class FollowingReference(Callback):
    """Moves the reference towards the actor, so that the KL is to a recent policy and not to the model of the start.

    Every ``every_n_steps`` steps, after the updates: reference = mix * actor + (1 - mix) * reference. With ``mix`` 1 it
    is a copy, with a small one and ``every_n_steps`` 1 an exponential moving average. This is ``sync_ref_model`` of TRL
    with the same numbers. See "Learn Your Reference Model for Real Good Alignment", Gorbatovski et al. 2024.

    Checkpoints contain the reference, and a resumed run has the same bits.

    The reference must have weights of its own. An average with a small ``mix`` needs it in float32: set ``dtype:
    float32`` of its source.

    Args:
        every_n_steps: number of steps between two moves, at least 1.
        mix: part of the actor, in (0, 1].
    """

    def __init__(self, every_n_steps: int = 512, mix: float = 0.6) -> None:
        check_range("every_n_steps", every_n_steps, "at least 1")
        check_range("mix", mix, "in (0, 1]")
        self.every_n_steps = every_n_steps
        self.mix = mix

    def setup(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Raise if the module has no reference that can follow; make checkpoints contain it.

        Raises:
            UsageError: the reference does not exist, shares its weights, has other layers than the actor, or is divided
                in a way that this callback does not know.
        """
        check_module(self, pl_module, RoleModule)
        kind = type(pl_module).__name__
        if _REF not in pl_module.sources:
            adapted = pl_module.sources[_ACTOR].lora is not None
            what = "is the actor without its adapters" if adapted else "is not used"
            raise UsageError(f"FollowingReference needs a reference with weights of its own, but that of {kind} {what}")
        if pl_module.sources[_ACTOR].lora is not None:
            raise UsageError("FollowingReference averages all weights, but the actor trains adapters only: remove lora")
        if other := pl_module.shared_base_of(_REF):
            raise UsageError(
                f"FollowingReference would also change the {other}, which shares weights with the reference"
            )
        if not hasattr(trainer.strategy, "stored_frozen_roles") or "DeepSpeed" in type(trainer.strategy).__name__:
            raise UsageError(
                f"FollowingReference does not know how {type(trainer.strategy).__name__} divides weights: use "
                f"rlhf_fsdp, rlhf_ddp or rlhf_single"
            )
        trainer.strategy.stored_frozen_roles = (_REF,)

    def on_fit_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Raise if a moving average would be lost to rounding, or the architectures differ.

        Raises:
            UsageError: one of these.
        """
        pairs = list(self._pairs(pl_module))
        if self.mix < _LEAST_IN_BFLOAT16 and any(ref.dtype == torch.bfloat16 for _, ref in pairs):
            raise UsageError(
                f"FollowingReference with mix {self.mix} changes weights in bfloat16 by less than their rounding: set "
                f"dtype: float32 of the source of ref, or mix to at least {_LEAST_IN_BFLOAT16}"
            )

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the reference, if it is time."""
        if trainer.global_step % self.every_n_steps:
            return
        pl_module.role_strategy.end_phase()  # an idle reference is in host memory
        for actor, ref in self._pairs(pl_module):
            ref.lerp_(actor.to(ref), self.mix)
        log.debug("The reference follows the actor at step %d.", trainer.global_step)

    def _pairs(self, module: RoleModule) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's part of each parameter of actor and reference."""
        actor, ref = ([*map(_local, getattr(module, name).parameters())] for name in (_ACTOR, _REF))
        if [each.shape for each in actor] != [each.shape for each in ref]:
            raise UsageError("FollowingReference needs a reference with the architecture of the actor")
        return list(zip(actor, ref, strict=True))


def _local(parameter: nn.Parameter) -> Tensor:
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data
