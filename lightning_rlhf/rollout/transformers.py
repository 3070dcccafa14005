"""Rollout engine with ``generate`` of transformers: supports all devices of torch, but is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from typing_extensions import override

from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.functional.allowed_tokens import allowed_tokens
from lightning_rlhf.functional.logprobs import Float32Logits
from lightning_rlhf.images import ImageProcessor, TextImages, reader
from lightning_rlhf.models.attention import set_attention
from lightning_rlhf.models.classes import language_model_class
from lightning_rlhf.models.heads import EXCLUDED
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.ranges import check_range
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, RolloutEngine, finished
from lightning_rlhf.types import AllowedTokens, Completion, SamplingParams, TokenPrompt


class TransformersEngine(RolloutEngine):
    """Generates with transformers, from a second copy of the actor in the trainer's process.

    You get the greedy responses of vLLM, and other samples from the same distribution. The engine cannot generate
    during training, so ``max_staleness`` saves no time, although responses come from older weights. The run then warns
    you.

    Args:
        batch_size: prompts generated together, at least 1.
    """

    def __init__(self, batch_size: int = 128) -> None:
        check_range("batch_size", batch_size, "at least 1")
        self._batch_size = batch_size
        self._model: PreTrainedModel | None = None
        self._processor: ImageProcessor | None = None
        self._version = -1
        self._returns_experts = False
        self._recorder: Any = None

    @override
    def return_experts(self) -> None:
        self._returns_experts = True

    def start(self, setup: EngineSetup) -> None:
        """Build the model; the first push sets its weights."""
        self._processor = setup.processor
        config = set_attention(AutoConfig.from_pretrained(setup.model, trust_remote_code=False))
        with torch.random.fork_rng(devices=[]):
            auto = language_model_class(config)
            model = auto.from_config(config, dtype=getattr(torch, setup.dtype), trust_remote_code=False)
        head = model.get_output_embeddings()
        logits = getattr(config, "head_dtype", "float32")  # absent in the directory of a saved model
        if setup.dtype != logits == "float32" and type(head) is nn.Linear:
            head.__class__ = Float32Logits
        model.generation_config = GenerationConfig()  # otherwise generate() uses the model's own sampling options
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
        if self._returns_experts:
            self._recorder = the_offered("router_replay").ExpertRecorder(self._model)

    @override
    def wait(self) -> str:
        return f"transformers' generate on {self._running.device} in {str(self._running.dtype).removeprefix('torch.')}"

    @torch.no_grad()
    @override
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        not_updated = dict(whole_tensors(self._running))
        for name, tensor in parameters:
            not_updated.pop(name).copy_(tensor)
        if not_updated:
            raise RunError(f"the push contained no weights for {sorted(not_updated)[:3]} ...")
        self._version = version

    @property
    @override
    def traits(self) -> EngineTraits:
        return EngineTraits(reads_images=True)

    @torch.no_grad()
    @override
    def request(
        self, prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        completions = list[Completion]()
        for first in range(0, len(prompts), self._batch_size):
            batch = slice(first, first + self._batch_size)
            limits = [parameters.max_tokens for parameters in sampling[batch]]
            longest = replace(sampling[first], max_tokens=max(limits))
            sampled = self._generate_batch(prompts[batch], longest, seeds[batch])
            cut = [completion.cut(limit) for completion, limit in zip(sampled, limits, strict=True)]
            if longest.echo:
                cut = list(map(self._with_prompt, prompts[batch], cut))
            completions += cut
        return finished(completions)

    def _generate_batch(
        self, prompts: Sequence[TokenPrompt], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        model: Any = self._running
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
        attention_mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
        )
        sampler = SeededSampler(sampling, seeds)
        pictures = self._images(prompts)
        if self._recorder is not None:
            self._recorder.begin()
        output = model.generate(
            ids,
            attention_mask=attention_mask,
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=0,
            ),
            logits_processor=LogitsProcessorList([sampler]),
            **({} if pictures is None else pictures.generation_arguments(model, ids)),
        )[:, width:].tolist()
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        allowed: list[AllowedTokens | None] = [None] * len(output)
        if sampler.allowed:
            steps = AllowedTokens.join([step.map(partial(torch.unsqueeze, dim=0)) for step in sampler.allowed])
            allowed = [steps.map(partial(torch.select, dim=1, index=row)) for row in range(len(output))]
        completions = [self._completion(*row, sampling) for row in zip(output, logprobs, allowed, strict=True)]
        if self._recorder is None:
            return completions
        experts = self._recorder.of_rows(list(map(len, prompts)))
        lengths = [len(prompt) + len(each.token_ids) - 1 for prompt, each in zip(prompts, completions, strict=True)]
        return [
            replace(each, experts=row[:length]) for each, row, length in zip(completions, experts, lengths, strict=True)
        ]

    def _images(self, prompts: Sequence[TokenPrompt]) -> TextImages | None:
        """Return the images of prompts, each distinct one once; None without images."""
        images = [prompt.encoded_images for prompt in prompts]
        distinct = list(dict.fromkeys(image for of_prompt in images for image in of_prompt))
        if not distinct or self._processor is None:
            return None
        numbers = torch.full((len(prompts), max(map(len, images))), -1)
        for row, of_prompt in enumerate(images):
            numbers[row, : len(of_prompt)] = torch.tensor([distinct.index(image) for image in of_prompt]).long()
        tensors = [self._processor.tensors(image) for image in distinct]
        of_texts: TextImages = reader().TextImages(tensors, numbers)
        return of_texts.to(self._running.device)

    def _completion(
        self, row: list[int], logprobs: list[float], allowed: AllowedTokens | None, sampling: SamplingParams
    ) -> Completion:
        stops = [position for position, token in enumerate(row) if token in sampling.stop_token_ids]
        length = stops[0] + 1 if stops else len(row)
        whole = Completion(row, logprobs, "stop", self._version, allowed=allowed).cut(length)
        return replace(whole, finish_reason="stop" if stops else "length")

    def _with_prompt(self, prompt: TokenPrompt, completion: Completion) -> Completion:
        """Return a completion that begins with the prompt, as :attr:`SamplingParams.echo` requests."""
        model: Any = self._running
        ids = torch.tensor([list(prompt)], device=model.device)
        pictures = self._images([prompt])
        arguments = {} if pictures is None else pictures.arguments(model, ids, None)
        logprobs = model(ids, use_cache=False, **arguments).logits[0, :-1].float().log_softmax(dim=-1)
        echoed = logprobs.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1).tolist()
        return replace(
            completion,
            token_ids=[*prompt[1:], *completion.token_ids],
            logprobs=[*echoed, *completion.logprobs],
        )

    @override
    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        ours = dict(whole_tensors(self._running))
        for name, tensor in parameters:
            if not torch.equal(ours[name].cpu(), tensor.to(ours[name].dtype).cpu()):
                return name
        return None

    def close(self) -> None:
        """Free the model."""
        self._model = None

    @property
    def _running(self) -> PreTrainedModel:
        if self._model is None:
            raise RunError("the engine is not running: call start() first")
        return self._model


class SeededSampler(LogitsProcessor):
    """Sampling with one random generator per row, by adding Gumbel noise before transformers' greedy search.

    The argmax of log-probabilities plus Gumbel noise is a sample of the distribution, so a row's sample depends only
    on its seed and its logits.

    Args:
        sampling: sampling parameters.
        seeds: seed of each row.
    """

    def __init__(self, sampling: SamplingParams, seeds: Sequence[int]) -> None:
        self._temperature = sampling.temperature
        self._never_sampled = list(sampling.never_sampled)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._limits = sampling.limits
        self.logprobs: list[Tensor] = []
        self.allowed: list[AllowedTokens] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores whose largest is the sampled token; append its log-probability to ``logprobs``.

        Args:
            input_ids: (B, L) tokens so far.
            scores: (B, V) logits.

        Returns:
            (B, V) scores.
        """
        scores = scores.float()
        if self._never_sampled:
            scores[:, self._never_sampled] += EXCLUDED
        if self._temperature == 0:
            logprobs = noisy = scores.log_softmax(dim=-1)
        else:
            scores = scores / self._temperature
            if self._limits:
                kept = allowed_tokens(scores, self._limits)
                self.allowed.append(AllowedTokens.of(kept.sum(dim=1).cpu(), kept.nonzero()[:, 1].cpu()))
                scores = scores.masked_fill(~kept, -torch.inf)
            logprobs = scores.log_softmax(dim=-1)
            noise = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=g) for g in self._generators])
            noisy = logprobs - noise.log().to(scores.device)
        sampled = noisy.argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, sampled).squeeze(1))
        return noisy
