"""Rewards of the completions of a rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.columns import unread_message
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.tokenizers import end_tokens
from lightning_rlhf.environments.conversation import StopReason, last_turn_start
from lightning_rlhf.environments.host import FaultKind
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.executor import Calls, MetricSums, RewardExecutor, RolloutRewards
from lightning_rlhf.rewards.function import (
    CONVERSATION_COLUMNS,
    ENVIRONMENT,
    RewardFunction,
    TrainerState,
    check_rewards,
)
from lightning_rlhf.types import Completion, PromptBatch, Rollout

log = logging.getLogger(__name__)


class Scorer:
    """Reward functions of one request: completions are scored as they finish, or at the end.

    Args:
        prompts: N prompts.
        executor: executor of the reward functions.
        tokenizer: tokenizer that decodes responses for the functions; special tokens are left out.
        samples: G, responses per prompt.
        state: progress of the run, for functions that use ``trainer_state``.
        environment: settings of the environment whose conversations the completions are; None without one.
    """

    def __init__(
        self,
        prompts: PromptBatch,
        executor: RewardExecutor,
        tokenizer: PreTrainedTokenizerBase,
        samples: int = 1,
        state: TrainerState | None = None,
        environment: EnvironmentSettings | None = None,
    ) -> None:
        self._prompts = prompts
        self._executor = executor
        self._tokenizer = tokenizer
        self._samples = samples
        self._state = state
        self._environment = environment
        self._started: Calls = {}
        self._completions: Sequence[Completion] = ()
        self._wait: Callable[[], RolloutRewards] | None = None

    def add(self, index: int, completion: Completion) -> None:
        """Start scoring a completion before others are finished, if a reward function supports that.

        Args:
            index: index of the completion in the rollout.
            completion: finished completion.
        """
        if self._executor.has_streaming:
            self._started |= self._executor.launch(index, self._columns([index], [completion]), self._state)

    def launch(self, completions: Sequence[Completion]) -> None:
        """Start the reward functions for all completions.

        Args:
            completions: B = N x G completions, grouped by prompt.
        """
        columns = self._columns(range(len(completions)), completions)
        self._completions = completions
        self._wait = self._executor.launch_rest(columns, self._state, self._started)

    def results(self) -> RolloutRewards:
        """Wait for the reward functions that :meth:`launch` has started, and return their results.

        Raises:
            RuntimeError: a reward function failed.
        """
        assert self._wait is not None
        scored = self._wait()
        if self._environment is None:
            return scored
        of_failed = {"zero": 0.0, "skip": math.nan}.get(self._environment.on_error)
        return with_environment(scored, self._completions, of_failed)

    def score(self, completions: Sequence[Completion]) -> RolloutRewards:
        """Score all completions, and return the results; see :meth:`launch` and :meth:`results`."""
        self.launch(completions)
        return self.results()

    def add_rewards(self, rollout: Rollout, scored: RolloutRewards) -> Rollout:
        """Return a rollout with the results of the reward functions and their weighted sum, on its device."""
        terms = [(reward.weight, scored.rewards[reward.label]) for reward in self._executor.functions]
        if self._environment is not None:
            terms.append((self._environment.weight, scored.rewards[ENVIRONMENT]))
        device, total = rollout.reward.device, weighted_sum(terms, len(rollout))

        def without_skipped(values: Tensor) -> Tensor:
            return values.masked_fill(scored.unknown, math.nan).to(device)

        return replace(
            rollout,
            rewards={name: without_skipped(values) for name, values in scored.rewards.items()},
            reward=without_skipped(total),
            skipped=scored.unknown.to(device),
        )

    def dry_run(self) -> None:
        """Call the reward functions with the prompts in place of responses, and with empty responses.

        Raises:
            ValueError: a function fails.
        """
        end = [self._tokenizer.eos_token_id]
        rows = [prompt.token_ids for prompt in self._prompts] * self._samples
        responses = [ids if row % 2 == 0 and ids else end for row, ids in enumerate(rows)]
        completions = [Completion(list(ids), [0.0] * len(ids), "stop", 0) for ids in responses]
        self._executor.dry_run(self._columns(range(len(completions)), completions))

    def columns(self, completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """Return the values that reward functions can have as arguments, for all completions."""
        return self._columns(range(len(completions)), completions)

    def _columns(self, indices: Sequence[int], completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """Return the values that reward functions can have as arguments, for the completions with these indices."""
        prompts = [self._prompts.prompts[index // self._samples] for index in indices]
        has_messages = any(prompt.messages for prompt in self._prompts)
        ids = [sampled_tokens(completion) for completion in completions]
        finished = [completion.finish_reason == "stop" for completion in completions]
        texts = self._tokenizer.batch_decode([last_turn(each) for each in completions], skip_special_tokens=True)
        return {
            **({} if self._environment is None else _conversation_columns(completions, texts)),
            "prompts": [prompt.text for prompt in prompts],
            "completions": texts,
            "completion_ids": ids,
            "finished": finished,
            "end_tokens": end_tokens(self._tokenizer, ids, finished),
            **{name: [prompt.columns[name] for prompt in prompts] for name in self._prompts.column_names},
            "messages": [prompt.messages for prompt in prompts] if has_messages else [],
        }


def _conversation_columns(completions: Sequence[Completion], texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns of conversations; the completions of a dry run have no records.

    Args:
        completions: conversations.
        texts: text of the last turn of each.
    """
    columns: dict[str, list[Any]] = {name: [] for name in CONVERSATION_COLUMNS}
    for completion, text in zip(completions, texts, strict=True):
        record = completion.conversation
        if record is None:
            values: tuple[Any, ...] = ([{"role": "assistant", "content": text}], 1, 0.0, "done")
        else:
            values = (record.messages, len(record.turn_ends), sum(record.turn_rewards), record.stop)
        for name, value in zip(CONVERSATION_COLUMNS, values, strict=True):
            columns[name].append(value)
    return columns


def sampled_tokens(completion: Completion) -> list[int]:
    """Return the tokens of a completion that the policy sampled."""
    if completion.sampled is None:
        return completion.token_ids
    return [token for token, sampled in zip(completion.token_ids, completion.sampled, strict=True) if sampled]


def last_turn(completion: Completion) -> list[int]:
    """Return the tokens of a completion, or those of the last turn of a conversation."""
    if completion.conversation is None:
        return completion.token_ids
    return completion.token_ids[last_turn_start(completion.conversation.turn_ends, completion.sampled or ()) :]


def with_environment(
    scored: RolloutRewards, completions: Sequence[Completion], reward_of_failed: float | None = None
) -> RolloutRewards:
    """Add the rewards of the environment, and metrics of the conversations, to those of the reward functions.

    Args:
        scored: results of the reward functions.
        completions: conversations.
        reward_of_failed: all rewards of conversations whose environment failed: NaN if they are left out; None keeps
            those until the failure.
    """
    records = [each.conversation for each in completions if each.conversation is not None]
    rewards = {**scored.rewards, ENVIRONMENT: torch.tensor([sum(record.turn_rewards) for record in records])}
    failed = torch.tensor([record.fault is not None for record in records])
    if reward_of_failed is not None:
        rewards = {name: values.masked_fill(failed, reward_of_failed) for name, values in rewards.items()}
    return replace(scored, rewards=rewards, metrics=scored.metrics | conversation_metrics(completions))


def conversation_metrics(completions: Sequence[Completion]) -> MetricSums:
    """Return the metrics of conversations: for each the sum and the number of its terms."""
    records = [each.conversation for each in completions if each.conversation is not None]
    count = float(len(records))
    tokens = float(sum(len(each.token_ids) for each in completions))
    written = sum((each.sampled or ()).count(False) for each in completions)
    totals: dict[str, float] = {
        "turns": sum(len(record.turn_ends) for record in records),
        "tool_calls": sum(record.tool_calls for record in records),
        "malformed_calls": sum(record.malformed for record in records),
    }
    totals |= {f"stop_{reason}": sum(record.stop == reason for record in records) for reason in get_args(StopReason)}
    totals |= {f"fault_{kind}": sum(record.fault == kind for record in records) for kind in get_args(FaultKind)}
    for name in sorted({name for record in records for name in record.metrics} - totals.keys()):
        totals[name] = sum(record.metrics.get(name, 0.0) for record in records)
    sums = {f"env/{name}": (float(total), count) for name, total in totals.items()}
    seconds = sum(record.environment_s for record in records)
    return {**sums, "env/written_fraction": (float(written), tokens), "time/environment_s": (seconds, count)}


def weighted_sum(terms: Sequence[tuple[float, Tensor]], rows: int) -> Tensor:
    """Return the (B,) sum of weight times reward over the rewards that apply; NaN where none with a weight applies.

    Without a reward with a weight, it is 0: such rewards are only logged.

    Args:
        terms: weight and (B,) values of each reward, NaN where it does not apply.
        rows: B.
    """
    total, weighted = torch.zeros(rows), [values for weight, values in terms if weight]
    for weight, values in terms:
        total += weight * values.nan_to_num(0.0)
    if not weighted:
        return total
    return total.masked_fill(torch.stack(weighted).isnan().all(dim=0), math.nan)


def check_reward_functions(
    rewards: list[RewardFunction],
    executor: RewardExecutor,
    data: PromptDataModule,
    environment: EnvironmentSettings | None = None,
) -> None:
    """Validate reward functions against the first rows of the data, and call them once; warn about missing columns.

    Arguments and errors are those of :func:`call_reward_functions`.
    """
    call_reward_functions(rewards, executor, data, environment)
    for reward in rewards:
        for line in missing_columns(reward, data):
            log.warning("%s", line)


def call_reward_functions(
    rewards: list[RewardFunction],
    executor: RewardExecutor,
    data: PromptDataModule,
    environment: EnvironmentSettings | None = None,
) -> None:
    """Validate reward functions against the first rows of the data, and call them once.

    Args:
        rewards: reward functions of the run; may be empty.
        executor: executor of these functions.
        data: data module that was set up.
        environment: environment of the run, whose conversations are then passed to the functions, too.

    Raises:
        ValueError: names of rewards are not valid, a column is missing, or a function cannot be called.
    """
    firsts = [examples[:2] for examples in data.examples.values() if examples]
    batches = [data.collate(rows, list(range(len(rows))), [], 0) for rows in firsts]
    columns = sorted({name for batch in batches for name in batch.column_names})
    check_rewards(rewards, columns, [] if environment is None else CONVERSATION_COLUMNS)
    if environment is None:
        check_unread(rewards, data)
    for batch in batches[:1]:
        Scorer(batch, executor, data.tokenizer, samples=3 - len(batch), environment=environment).dry_run()


def read_columns(rewards: Sequence[RewardFunction], columns: Iterable[str]) -> set[str]:
    """Return those of some columns that reward functions read; a function with ``**kwargs`` receives all."""
    takes_all = any(p.kind is p.VAR_KEYWORD for reward in rewards for p in reward.parameters)
    return (
        set(columns) if takes_all else {name for name in columns if any(name in reward.columns for reward in rewards)}
    )


def check_unread(rewards: Sequence[RewardFunction], data: PromptDataModule) -> None:
    """Check that a column that is part of the text in other libraries is read by a reward function, if by nothing else.

    Raises:
        UsageError: nothing reads such a column.
    """
    for name in sorted(data.lost_columns - read_columns(rewards, data.lost_columns)):
        raise UsageError(unread_message(name))


def missing_columns(reward: RewardFunction, data: PromptDataModule) -> list[str]:
    """Return a line for each column that a reward function needs and some rows lack."""
    lines = []
    for name, examples in data.examples.items():
        report = data.reports[name]
        lines += reward.missing_columns([row.columns for row in examples], report.name, report.locations)
    return lines
