"""WithGreedy: a greedy response to each prompt, as a baseline of the sampled ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from lightning_rlhf.rollout.source import SampledRollout, Source, StepRequests
from lightning_rlhf.types import PromptBatch


@dataclass(frozen=True)
class WithGreedy(Source):
    """Adds the greedy responses of a second source, whose rewards are known when the step begins.

    ReMax subtracts the reward of the greedy response to a prompt from those of the sampled ones ("ReMax", Li et al.
    2023, equation 4). The greedy responses are not trained on.

    Args:
        source: source of the sampled responses.
        greedy: source of one greedy response to each prompt.
    """

    source: Source
    greedy: Source

    @override
    def request(self, prompts: PromptBatch, step: int, in_background: bool = False) -> StepRequests:
        sampled = self.source.request(prompts, step, in_background)
        return replace(sampled, greedy=self.greedy.request(prompts, step, in_background))

    @override
    def collect(self, requests: StepRequests) -> SampledRollout:
        assert requests.greedy is not None
        sampled = self.source.collect(requests)
        baseline = self.greedy.collect(requests.greedy).scored()
        return replace(
            sampled,
            greedy=baseline.rollout,
            requests=requests.all,
            reward_sums=(*sampled.reward_sums, *baseline.reward_sums),
        )
