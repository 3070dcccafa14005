"""DynamicSampling: replaces prompts whose responses all have the same reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_rlhf.batching.sequences import concatenate
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.objectives.base import AdvantageEstimator
from lightning_rlhf.ranges import check_ranges
from lightning_rlhf.rollout.clock import sum_over_ranks
from lightning_rlhf.rollout.source import SampledRollout, Source, StepRequests
from lightning_rlhf.types import PromptBatch, Rollout


@dataclass(frozen=True)
class DynamicSampling:
    """Generates until enough prompts have responses of differing reward ("DAPO", Yu et al. 2025, section 3.2).

    Use it with GRPO if your policy solves many prompts always or never, because equal rewards in a group give zero
    advantages. Responses are generated in rounds of ``prompts_per_step`` prompts. The rounds end when that many prompts
    show contrast (responses with different rewards), or when the data's batch is exhausted. Unused prompts of the batch
    return in a later epoch, or first in the next batch with the sampler ``Adaptive``. If too few prompts show contrast,
    others fill the step. They count in metrics, but you do not train on them. A reward model scores the responses of
    each round, and those of the step again.

    Args:
        prompts_per_step: prompts that a step trains on, at least 1. The data's ``batch_size`` must be a multiple of it.
        reward: name of the reward that must differ between responses. None compares the weighted sum of all reward
            functions, plus the shaped score of the reward model.
    """

    prompts_per_step: int
    reward: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, prompts_per_step="at least 1")

    def check(
        self,
        batch_size: int,
        group_size: int,
        weights: Mapping[str, float],
        advantages: AdvantageEstimator,
        ranks: int,
        scored: bool = False,
    ) -> None:
        """Validate the settings before anything is generated.

        Args:
            group_size: responses per prompt.
            weights: weight of each reward by its name.
            advantages: estimator of the advantages.
            ranks: number of ranks that share the step.
            scored: whether a reward model scores the responses.

        Raises:
            ValueError: sizes are not divisible, no reward can be compared, or greedy responses are needed.
        """
        if batch_size % self.prompts_per_step:
            raise UsageError(
                f"dynamic sampling generates in rounds of prompts_per_step={self.prompts_per_step}, which does not "
                f"divide the data's batch_size {batch_size}: use a multiple of it"
            )
        if group_size < 2:
            raise UsageError(
                f"dynamic sampling compares responses to one prompt: group_size must be at least 2, got {group_size}"
            )
        names = [name for name, weight in weights.items() if self.reward is not None or weight]
        if (not names and not scored) or (self.reward is not None and self.reward not in names):
            raise UsageError(
                f"dynamic sampling compares the values of a reward: {self.reward or 'any'} is not among {names}; with "
                f"reward null it compares their sum with the score of the reward model"
            )
        if advantages.needs_greedy:
            raise UsageError(
                f"dynamic sampling does not support the greedy responses of {type(advantages).__name__}: "
                f"remove dynamic_sampling"
            )
        if batch_size % ranks or self.prompts_per_step % ranks:
            raise UsageError(
                f"with dynamic sampling {ranks} ranks share batch_size {batch_size} and prompts_per_step "
                f"{self.prompts_per_step} equally: use multiples of {ranks}"
            )

    def __call__(
        self,
        batch: PromptBatch,
        generate: Callable[[PromptBatch], Rollout],
        ranks: int = 1,
        any_rank: Callable[[bool], bool] = bool,
        total_reward: Callable[[Rollout], Tensor] = lambda rollout: rollout.reward,
    ) -> tuple[Rollout, Rollout, dict[str, float]]:
        """Return the rollout of this rank's part of ``prompts_per_step`` prompts.

        Args:
            batch: prompts; their number is a multiple of this rank's part.
            generate: function that generates and scores the responses to some prompts.
            ranks: number of ranks that share the step.
            any_rank: function that returns whether any rank needs another round; ranks that share an engine must call
                it equally often.
            total_reward: function that returns the (B,) rewards that must differ.

        Returns:
            The rollout, the responses that are not in it with their total rewards, and counts of generated prompts and
            rewards, for :meth:`metrics`.
        """
        wanted = self.prompts_per_step // ranks
        parts = list[Rollout]()  # of each round
        totals = list[Tensor]()
        contrasts = list[Tensor]()
        usable = generated = 0
        while any_rank(usable < wanted) and generated < len(batch):
            rollout = generate(batch[generated : generated + wanted])
            totals.append(total_reward(rollout))
            contrast = self._contrast(rollout, totals[-1])
            usable += int(rollout.group[contrast].unique().numel())
            generated += wanted
            parts.append(replace(rollout, included=contrast))
            contrasts.append(contrast)
        every, reward = concatenate(parts), torch.cat(totals)
        order = torch.argsort(~torch.cat(contrasts), stable=True)
        size = len(totals[0]) // wanted
        used, others = order[: wanted * size], order[wanted * size :]
        rows = replace(every[used], group=torch.arange(wanted).repeat_interleave(size))
        return (
            rows,
            replace(every[others], reward=reward[others]),
            {
                "generated": float(generated),
                "contrast": float(usable),
                "missing": float(max(wanted - usable, 0)),
                "reward": reward.double().nansum().item(),
                "responses": float((~reward.isnan()).sum()),
            },
        )

    def metrics(self, counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a step from the counts of all ranks."""
        return {
            "rollout/generated_prompts": counts["generated"],
            "rollout/contrast_fraction": counts["contrast"] / counts["generated"],
            "rollout/filled_fraction": counts["missing"] / self.prompts_per_step,
            "reward/generated_mean": counts["reward"] / counts["responses"] if counts["responses"] else math.nan,
        }

    def _contrast(self, rollout: Rollout, total: Tensor) -> Tensor:
        """Return (B,) bool, whether the responses with a reward to each row's prompt differ in it."""
        values = total if self.reward is None else rollout.rewards[self.reward]
        groups = int(rollout.group.max()) + 1
        low, high = (
            torch.zeros(groups).scatter_reduce(
                0, rollout.group, values.nan_to_num(nan=missing), how, include_self=False
            )
            for how, missing in (("amin", torch.inf), ("amax", -torch.inf))
        )
        return (low < high)[rollout.group]


@dataclass(frozen=True)
class WithContrast(Source):
    """Generates in rounds of another source, until enough prompts have responses with different rewards.

    Args:
        source: source of the responses to some prompts.
        settings: settings of the rounds.
        ranks: ranks that share the step.
        device: device of reductions over ranks.
        in_turns: whether ranks with different prompts need the same number of rounds, because they share an engine or a
            model that scores.
        total_reward: function of a rollout that returns the (B,) rewards with the score of a reward model. All ranks.
    """

    source: Source
    settings: DynamicSampling
    ranks: DataRanks
    device: torch.device
    in_turns: bool
    total_reward: Callable[[Rollout], Tensor]

    def request(self, prompts: PromptBatch, step: int, in_background: bool = False) -> StepRequests:
        """Request the responses of the first round; see :meth:`Source.request`."""
        first = self.settings.prompts_per_step // self.ranks.size
        return replace(self.source.request(prompts[:first], step, in_background), later=prompts[first:])

    def collect(self, requests: StepRequests) -> SampledRollout:
        """Generate the other rounds; see :meth:`Source.collect`."""
        assert requests.later is not None
        rounds: list[SampledRollout] = []

        def generate(prompts: PromptBatch) -> Rollout:
            requested = self.source.request(prompts, requests.step) if rounds else requests
            rounds.append(self.source.collect(requested).scored())
            return rounds[-1].rollout

        prompts = replace(requests.prompts, prompts=[*requests.prompts, *requests.later])
        rollout, unused, counts = self.settings(
            prompts, generate, self.ranks.size, self._any_rank, total_reward=self.total_reward
        )
        return SampledRollout(
            rollout,
            unused=unused,
            requests=tuple(request for each in rounds for request in each.requests),
            reward_sums=tuple(sums for each in rounds for sums in each.reward_sums),
            metrics=self.settings.metrics(sum_over_ranks(counts, self.ranks, self.device)),
        )

    def _any_rank(self, needs_more: bool) -> bool:
        """Return whether any rank needs another round; then all of them generate, if they take turns."""
        if not self.in_turns:
            return needs_more
        return bool(self.ranks.max(torch.tensor(float(needs_more), device=self.device)))
