"""One conversation with made-up turns, to show the messages of an environment before a run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.rollout.conversation_loop import ConversationRequest
from lightning_rlhf.rollout.conversations import conversation_sampler, row_of
from lightning_rlhf.rollout.engine import CompletionCheck, RolloutEngine
from lightning_rlhf.types import Completion, SamplingParams

_TOKENS = 100_000  # behind the prompt
_VOCABULARY = 1 << 31


class _MadeUpTurns:
    """Engine whose turns all have the same text."""

    overlaps = False

    def __init__(self, turn: list[int]) -> None:
        self._turn = turn

    def request(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Return the turn once for each prompt."""
        futures = []
        for own in sampling:
            future: Future[Completion] = Future()
            future.set_result(Completion(self._turn, [0.0] * len(self._turn), "stop", 0).cut(own.max_tokens))
            futures.append(future)
        return futures


def preview(settings: EnvironmentSettings, data: PromptDataModule, text: str) -> Completion:
    """Generate a conversation for the first prompt of the training data.

    Args:
        settings: environment of the run.
        data: data module that was set up.
        text: text of each turn.

    Returns:
        The conversation; ``sampled`` marks the made-up turns.

    Raises:
        ValueError: the chat template does not allow conversations.
        RuntimeError: the environment failed.
    """
    tokenizer = data.tokenizer
    batch = data.collate(data.examples["train"][:1], [0], [0], 0)
    sampler = conversation_sampler(settings, data)
    request = ConversationRequest(
        prompt_ids=batch.token_ids[0],
        text=batch.texts[0],
        messages=batch.messages[0] if batch.messages else [],
        row=row_of(batch, 0),
        seed=0,
        turn_seeds=tuple(range(settings.max_turns)),
        sampling=SamplingParams(_TOKENS),
    )
    turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    engine: Any = _MadeUpTurns(turn)
    try:
        check = CompletionCheck(_TOKENS, 0, _VOCABULARY)
        return sampler(cast(RolloutEngine, engine), [request], None, check)[0]
    finally:
        sampler.close()
