"""A new rollout engine has four methods. This one samples with one forward pass per token.

Pass it as ``RolloutLoop(engine=PlainEngine())``, or in YAML as ``engine: {class_path: my_engine.PlainEngine}``.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine, finished
from lightning_rlhf.types import Completion, SamplingParams


class PlainEngine(RolloutEngine):
    """Samples with a model of transformers on the CPU."""

    def start(self, setup: EngineSetup) -> None:
        """Build the model; its weights arrive with the first push."""
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(setup.model)).eval()

    def wait(self) -> str:
        """Return a description for the log."""
        return "a plain loop over tokens"

    @torch.no_grad()
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the actor's weights."""
        weights = dict(whole_tensors(self.model))
        for name, tensor in parameters:
            weights[name].copy_(tensor)
        self.version = version

    def request(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Return the completions, which are generated at once."""
        return finished(map(self.sampled, prompts, sampling, seeds))

    @torch.no_grad()
    def sampled(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        """Sample one response; an argmax with Gumbel noise is a sample of the distribution."""
        generator, ids, logprobs = torch.Generator().manual_seed(seed), list(prompt), list[float]()
        while len(logprobs) < sampling.max_tokens and (not logprobs or ids[-1] not in sampling.stop_token_ids):
            logits = self.model(torch.tensor([ids])).logits[0, -1] / (sampling.temperature or 1.0)
            distribution = logits.log_softmax(dim=-1)
            noise = torch.empty_like(logits).exponential_(generator=generator).log() if sampling.temperature else 0.0
            ids.append(int((distribution - noise).argmax()))
            logprobs.append(float(distribution[ids[-1]]))
        reason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
        return Completion(ids[len(prompt) :], logprobs, reason, self.version)
