"""Validation of the parts of an algorithm: estimator, policy loss, correction, rewards."""

from __future__ import annotations

import logging
from typing import Any

from lightning_rlhf.expected_errors import UsageError

log = logging.getLogger(__name__)


def check_algorithm(module: Any) -> None:
    """Validate the arguments of an RLHFModule, whose file imports this one; warn about a KL loss without effect.

    A KL loss with a random gradient is warned about, too.

    Args:
        module: module with all of its arguments.

    Raises:
        ValueError: an argument is out of range, or some do not fit each other.
    """
    if module.kl_loss.coef > 0 and module.kl_loss.estimator == "k1" and not module.kl_loss.importance:
        log.warning("kl_loss with estimator k1 has no effect: its expected gradient is zero. Use k2 or k3")
    if module.kl_loss.coef > 0 and module.kl_loss.estimator == "abs":
        log.warning(
            "kl_loss with estimator abs has the sign of a rounding error as gradient where actor and reference are "
            "equal, as in the first update. Use abs+, k2 or k3"
        )
    estimator, policy_loss = type(module.advantages).__name__, type(module.policy_loss).__name__
    for name in ("update_epochs", "minibatch_size"):
        if getattr(module, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(module, name)}")
    if module.ent_coef < 0:
        raise UsageError(f"ent_coef must be at least 0, got {module.ent_coef}")
    if module.advantages.needs_critic and "critic" not in module.trained_roles:
        raise UsageError(
            f"{estimator} needs a critic, which {type(module).__name__} does not have: use PPOModule, or an "
            f"estimator without critic such as GRPO"
        )
    if module.advantages.needs_sum_pi_squared and module.correction.bypass:
        raise UsageError(
            f"{estimator} evaluates the actor on every response, which bypass leaves out: use another correction"
        )
    if not module.advantages.reads_total_reward and ("reward_model" in module.sources or module.kl_reward.coef > 0):
        raise UsageError(
            f"{estimator} uses only its own reward keys, so reward_model and kl_reward would have no effect: "
            f"remove them; kl_loss works"
        )
    if module.correction.bypass and module.correction.level is not None and module.policy_loss.uses_ratio:
        raise UsageError(
            f"with bypass, the ratio of {policy_loss} is the importance weight already: use ReinforceLoss, or "
            f"level null"
        )
