"""RouterReplay: the trainer of a mixture of experts uses the experts that the engine chose."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rlhf.callbacks.loop.checks import check_module, last_step_of
from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.router_replay.balance import BalanceLoss
from lightning_rlhf.extras.router_replay.routers import ForcedRouters, Routing, loads_of
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.ranges import check_range
from lightning_rlhf.rollout.clock import sum_over_ranks
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.types import RoutedExperts


class RouterReplay(Callback):
    """Lets the actor's routers choose the experts that the engine chose for the same tokens.

    Engine and trainer round differently, so a router that finds two experts equally good chooses one in the engine and
    the other in the trainer, and the token's log-probs differ by much more than rounding. With the engine's choice they
    differ by rounding only. The routers still learn: the actor computes the weights of the chosen experts. See
    "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", Ma et al. 2025.

    The choice is replaced in all passes of the actor over responses that the engine sampled: before the updates and in
    them. Reference and critic choose themselves, and so does the actor for the last token, on whose experts no log-prob
    depends. All responses to a prompt have its experts from the first of them,
    because a pass may read the prompt only once.

    You see how often the choice was replaced, and how unevenly experts are used.

    Args:
        balance_coef: weight of a loss that balances the use of experts, see
            :class:`~lightning_rlhf.extras.router_replay.balance.BalanceLoss`, at least 0. Published configurations have
            0.001 (Qwen3-MoE) to 0.02 (Mixtral-8x7B). 0 leaves it out.
    """

    def __init__(self, balance_coef: float = 0.0) -> None:
        check_range("balance_coef", balance_coef, "at least 0")
        self.balance_coef = balance_coef
        self._routers: ForcedRouters | None = None

    def prepare_engine(self, engine: RolloutEngine, module: RLHFModule) -> None:
        """Let the engine return its experts, before it starts.

        Raises:
            UsageError: the engine cannot return them, or the actor is no mixture of experts.
        """
        Routing.of(module.sources["actor"].hf_config())
        engine.return_experts()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Validate the module, and that the engine samples all responses.

        Raises:
            UsageError: some responses are from the data, whose experts are unknown; a rank could have no others.
        """
        check_module(self, pl_module, RLHFModule)
        loops: list[Any] = [each for each in trainer.callbacks if isinstance(each, RolloutLoop)]
        if any(loop.given_responses is not None for loop in loops):
            raise UsageError("RouterReplay cannot be combined with given_responses of RolloutLoop: remove one of them")

    def on_fit_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Prepare the actor's routers."""
        actor: Any = pl_module.actor
        self._routers = ForcedRouters(actor.lm)
        if self.balance_coef:
            pl_module.added_losses.append(BalanceLoss(pl_module, self._routers, self.balance_coef))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RLHFModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log how often the choice was replaced, and how unevenly the experts of each layer are used. All ranks.

        Raises:
            RunError: the engine returned no experts, or the actor's loss does not use them.
        """
        assert self._routers is not None
        assert pl_module.last_rollout is not None
        ranks, experts = pl_module.data_ranks, pl_module.last_rollout.experts
        given, replaced = self._routers.replaced_counts()
        totals = sum_over_ranks({"given": given, "replaced": replaced}, ranks, pl_module.device)
        kind = type(pl_module).__name__
        updated = last_step_of(self, pl_module).actor_updates > 0  # not while a critic warms up
        if updated and not totals["given"]:
            reason = "the engine returned no experts" if experts is None else "its loss calls the actor without them"
            raise RunError(f"RouterReplay changed nothing in a step of {kind}: {reason}")
        if updated and any(isinstance(loss, BalanceLoss) and not loss.is_used for loss in pl_module.added_losses):
            raise RunError(f"the loss of {kind} does not add those of callbacks: remove balance_coef of RouterReplay")
        metrics = {"router/replaced_fraction": totals["replaced"] / totals["given"] if totals["given"] else math.nan}
        if experts is not None and self._routers.sparse_layers:
            loads = ranks.sum(expert_loads(experts, self._routers.routing.experts))
            by_layer = {layer: max_violation(loads[layer]) for layer in sorted(self._routers.sparse_layers)}
            metrics["router/max_violation_mean"] = sum(by_layer.values()) / len(by_layer)
            metrics |= {f"router/layer_{layer}/max_violation": value for layer, value in by_layer.items()}
        pl_module.log_step("router", metrics)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the routers choose themselves again."""
        if self._routers is not None:
            self._routers.remove()
            added: list[Any] = getattr(pl_module, "added_losses", [])
            added[:] = [loss for loss in added if not isinstance(loss, BalanceLoss)]
        self._routers = None


def expert_loads(routed: RoutedExperts, experts: int) -> Tensor:
    """Return how many tokens passed each expert, (L, E) float32.

    Args:
        routed: experts of some rows.
        experts: E, number of experts of a layer.
    """
    by_row = routed.numbers.view(torch.int16).unflatten(1, (-1, routed.layers, routed.choices))
    return torch.stack([loads_of(row - 1, experts) for row in by_row]).sum(dim=0)  # of all rows at once would be large


def max_violation(loads: Tensor) -> float:
    """Return by what fraction the most used expert has more tokens than it would have if all were used equally.

    See "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", Wang et al. 2024, eq. 4.

    Args:
        loads: (E,) tokens of each expert.
    """
    return float(loads.max() / loads.mean() - 1)
