"""WithGreedy: a greedy response to each prompt, as a baseline of the sampled ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_rlhf.rollout.source import Requests, SampledRollout, Source
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

    def start(self, prompts: PromptBatch, step: int, in_background: bool = False) -> Requests:
        """See :meth:`Source.start`."""
        parts = [source.start(prompts, step, in_background) for source in (self.source, self.greedy)]
        return Requests(prompts, tuple(request for part in parts for request in part.requests))

    def finish(self, requests: Requests) -> SampledRollout:
        """See :meth:`Source.finish`."""
        *sampled, greedy = requests.requests
        result = self.source.finish(replace(requests, requests=tuple(sampled)))
        baseline = self.greedy.finish(replace(requests, requests=(greedy,))).scored()
        return replace(
            result,
            greedy=baseline.rollout,
            requests=requests.requests,
            reward_sums=(*result.reward_sums, *baseline.reward_sums),
        )
