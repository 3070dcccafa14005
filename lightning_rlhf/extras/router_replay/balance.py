"""A loss that keeps routers from preferring a few experts, with the experts that the engine chose."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.router_replay.routers import ForcedRouters, loads_of
from lightning_rlhf.models.causal import flat_index
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.types import Experience, Rollout, RoutedExperts


class BalanceLoss:
    """Load-balancing loss of each token, which the module sums and divides like its policy loss.

    For an expert i, f_i is the number of times that the engine chose it for the step's sampled tokens on all ranks,
    divided by the number of these tokens, and p_i(t) the actor's probability of it at token t. The loss of a token is
    E sum_i f_i p_i(t), the mean over layers. Its gradient moves probability from the experts that the step used most to
    the others. Averaged over the tokens, it is E sum_i f_i P_i, as in "Switch Transformers", Fedus et al. 2021, eq. 4.
    If all experts are used equally, it is K, the number of choices of a token.

    Args:
        coef: weight of the loss, positive.

    Raises:
        UsageError: the architecture has another loss than this one, or ranks divide the tokens of a row.
    """

    def __init__(self, module: RLHFModule, routers: ForcedRouters, coef: float) -> None:
        config = module.sources["actor"].hf_config()
        if not hasattr(config.get_text_config(), "router_aux_loss_coef"):
            raise UsageError(
                f"balance_coef: the architecture {config.model_type!r} has no such loss for its routers: remove it"
            )
        if module.layout.divides_rows:
            raise UsageError("balance_coef does not work with sequence_parallel_size above 1: remove one of them")
        routers.keeps_probabilities = True
        self._module, self._routers = module, routers
        self._coef = coef
        self._rollout: Rollout | None = None
        self.is_used = False

    def __call__(self, rows: Experience, means: MeanAccumulator) -> Tensor:
        """Return the weighted loss of each token, (B, T), after the actor's forward pass over these rows. All ranks."""
        self.is_used = True
        rollout = self._module.last_rollout
        if rollout is None or rollout.experts is None:
            raise RunError("RouterReplay has nothing to balance: the engine returned no experts")
        if rollout is not self._rollout:
            self._rollout, self._fractions = rollout, self._fractions_of(rollout, rollout.experts)
        input_ids, index, packing = self._module.layout.lay_out(rows.rollout)
        places = flat_index(input_ids, index, packing)
        by_layer = self._routers.take_probabilities()
        losses = [probabilities @ self._fractions[layer] for layer, probabilities in by_layer.items()]
        values = self._routers.routing.experts * torch.stack(losses).mean(dim=0)[places]
        means.add("loss/balance", values, rows.mask)
        return self._coef * values

    def _fractions_of(self, rollout: Rollout, experts: RoutedExperts) -> Tensor:
        """Return f of each layer, (L, E). All ranks."""
        sampled = (rollout.response_mask & rollout.included.unsqueeze(1)).nonzero()
        rows, positions = sampled[:, 0], sampled[:, 1] + rollout.prompt_lengths[sampled[:, 0]] - 1
        loads = loads_of(experts.at(rows, positions), self._routers.routing.experts)
        of_all = self._module.data_ranks.sum(loads)
        return of_all / of_all.sum(dim=1, keepdim=True).clamp(min=1) * experts.choices
