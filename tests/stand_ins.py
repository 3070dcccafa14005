"""Small replacements for large or slow parts: models, rollouts, the engine, and a Trainer without output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.models.scalar import ScalarModel
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine, finished
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import Completion, Prompt, PromptBatch, PromptImages, Rollout, SamplingParams

VOCABULARY = 11
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "head_dim": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class TinyModel(FromConfig):
    """A llama model of two layers; as a scalar model its head is random too, because a head of zeros would hide
    errors."""

    architecture: dict[str, Any] = field(default_factory=lambda: dict(TINY_LLAMA))
    seed: int | None = 0

    def scalar(self) -> ScalarModel:
        model = super().scalar()
        generator = torch.Generator().manual_seed(self.seed or 0)
        torch.nn.init.normal_(model.lm.score.weight, std=0.3, generator=generator)
        return model

    def expect_head(self) -> None:
        """Accept the random head."""


# -- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """One row of a rollout, without padding."""

    prompt: list[int]
    tokens: list[int]
    reward: float = 0.0
    policy: list[bool] | None = None  # False for tokens that an environment wrote
    truncated: bool = False

    @property
    def mask(self) -> list[bool]:
        return [True] * len(self.tokens) if self.policy is None else self.policy


def responses(count: int, seed: int, *, observations: bool = False) -> list[Response]:
    """Return random responses of 1 to 7 tokens to prompts of 1 to 4 tokens; every third one is truncated."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    rows = []
    for i in range(count):
        prompt, tokens = ([number(0, VOCABULARY - 1) for _ in range(number(1, most))] for most in (4, 7))
        policy = [not 2 <= t <= 3 or t == len(tokens) - 1 for t in range(len(tokens))] if observations else None
        rows.append(Response(prompt, tokens, number(-20, 20) / 10, policy, truncated=i % 3 == 2))
    return rows


def prompt_batch(
    indices: Sequence[int],
    token_ids: Sequence[list[int]],
    texts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    messages: Sequence[Any] = (),
    images: Sequence[PromptImages] = (),
) -> PromptBatch:
    """Return prompts whose positions are their numbers in the batch, with columns as lists of their values."""
    return PromptBatch(
        [
            Prompt(
                token_ids[i],
                texts[i],
                columns={name: values[i] for name, values in columns.items()},
                messages=messages[i] if messages else (),
                images=images[i] if images else None,
                index=index,
                position=i,
            )
            for i, index in enumerate(indices)
        ]
    )


def each(batch: PromptBatch, name: str) -> list[Any]:
    """Return a field of each prompt, such as ``text``."""
    values = [getattr(prompt, name) for prompt in batch]
    return [list(value) for value in values] if name == "messages" else values


def columns_of(batch: PromptBatch) -> dict[str, list[Any]]:
    """Return the columns of prompts, with one value for each."""
    return {name: [prompt.columns[name] for prompt in batch] for name in batch.column_names}


def rollout_of(
    rows: Sequence[Response], *, dtype: torch.dtype = torch.float32, extra_columns: int = 0, temperature: float = 1.0
) -> Rollout:
    """Return the rows as tensors, padded with tokens and numbers that no code may use. ``policy_version`` is the row
    index."""
    prompts, prompt_lengths = _padded([row.prompt for row in rows], extra_columns)
    tokens, lengths = _padded([row.tokens for row in rows], extra_columns)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        mask[i, : len(row.tokens)] = torch.tensor(row.mask)
    reward = torch.tensor([row.reward for row in rows], dtype=dtype)
    return Rollout(
        prompt_ids=prompts,
        prompt_lengths=prompt_lengths,
        response_ids=tokens,
        response_lengths=lengths,
        response_mask=mask,
        rollout_logprobs=torch.zeros(tokens.shape, dtype=dtype).masked_fill(mask, -1.0),
        rewards={"given": reward},
        reward=reward,
        group=torch.arange(len(rows)),
        truncated=torch.tensor([row.truncated for row in rows]),
        policy_version=torch.arange(len(rows)).unsqueeze(1) * mask,
        included=torch.ones(len(rows), dtype=torch.bool),
        position=torch.arange(len(rows)),
        temperature=temperature,
    )


def _padded(rows: list[list[int]], extra_columns: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max()) + extra_columns), VOCABULARY - 1)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, lengths


# -- the world around a module ----------------------------------------------------------------------------------------


class HandOver(Callback):
    """Passes the batch itself to the module as the rollout."""

    provides_rollouts = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        pl_module.receive(batch)


def quiet_trainer(**options: Any) -> Trainer:
    """Return a Trainer on the CPU without logging, checkpoints or progress bar."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return Trainer(**(quiet | options))


def fit(module: LightningModule, batches: Iterable[Any], val: Iterable[Any] | None = None, **options: Any) -> Trainer:
    """Train on the batches, one step each; rollouts are passed to the module before the step."""
    batches, ckpt = list(batches), options.pop("ckpt", None)
    callbacks = [*options.pop("callbacks", [])]
    if isinstance(batches[0], Rollout):
        callbacks.append(HandOver())
    trainer = quiet_trainer(callbacks=callbacks, **options)
    loaders = [DataLoader(list(data), batch_size=None) for data in (batches, val) if data is not None]
    trainer.fit(module, *loaders, ckpt_path=ckpt)
    return trainer


class OneOfTwoRanks(RoleStrategy, SingleDeviceStrategy):
    """A rank in a thread that averages gradients with a second rank, as DDP does; each has separate rows."""

    gradient_scale = 2.0

    def __init__(self, ranks: DataRanks) -> None:
        super().__init__("cpu")
        self.data_ranks = copy(ranks)
        self.data_ranks.rank, self.data_ranks.size = 0, 1
        self.syncs: list[bool] = []

    @contextmanager
    def accumulate(self, name: str, sync: bool) -> Iterator[None]:
        yield
        self.syncs.append(sync)
        if sync:
            for parameter in getattr(self.lightning_module, name).parameters():
                parameter.grad = self.data_ranks.sum(parameter.grad) / 2


class ScriptedEngine(RolloutEngine):
    """Generates the given texts in turn, regardless of prompts and weights; every token has a log-probability of -1.

    Use it with ``check_rows=0``: its log-probabilities are not the actor's.
    """

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts, self.tokenizer = list(texts), tokenizer
        self.calls: list[str] = []  # the calls in their order
        self.version = -1

    def start(self, setup: EngineSetup) -> None:
        self.calls.append("start")

    def wait(self) -> str:
        return "a script"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        list(parameters)
        self.calls.append(f"update_weights {version}")
        self.version = version

    def request(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        if not prompts:
            return []
        longest = replace(sampling[0], max_tokens=max(parameters.max_tokens for parameters in sampling))
        completions = self.generate(prompts, longest, seeds)
        limits = [parameters.max_tokens for parameters in sampling][: len(completions)]
        return finished(
            completion if limit == longest.max_tokens else completion.cut(limit)
            for completion, limit in zip(completions, limits, strict=True)
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        self.calls.append(f"generate {len(prompts)}")
        output = []
        for i in range(len(prompts)):
            ids = self.tokenizer(self.texts[i % len(self.texts)], add_special_tokens=False)["input_ids"]
            ids = [*ids, *sampling.stop_token_ids[:1]]
            reason = "stop" if len(ids) <= sampling.max_tokens else "length"
            ids = ids[: sampling.max_tokens]
            output.append(Completion(ids, [-1.0] * len(ids), reason, self.version))
        return output

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        return None

    def close(self) -> None:
        self.calls.append("close")
