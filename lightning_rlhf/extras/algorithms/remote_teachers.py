"""Teachers outside of the trainer's processes, which return the most likely tokens at each position of given texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.processes.waiting import results_logged
from lightning_rlhf.types import Rollout, TopTokens


class RemoteTeacher(ABC):
    """A teacher that is asked for its most likely tokens, such as one on vLLM servers."""

    @abstractmethod
    def check(self, tokenizer: PreTrainedTokenizerBase | None, temperature: float) -> None:
        """Validate before the first step that the teacher can be asked.

        Args:
            tokenizer: tokenizer of the run; None compares no tokens.
            temperature: temperature of the sampling.

        Raises:
            ValueError: the teacher has no log-probabilities at this temperature, or other tokens.
            RuntimeError: it does not answer.
        """

    @abstractmethod
    def request(self, rollout: Rollout, top_k: int, vocabulary: int | None = None) -> list[Future[TopTokens]]:
        """Request the distributions of the responses of some rows.

        Args:
            rollout: B rows, with the prompts of the teacher.
            top_k: K, number of tokens of each distribution.
            vocabulary: number of tokens of the run's models; None does not limit the ids.

        Returns:
            For each row the (T, K) top tokens of its response, T its length.
        """


def results(pending: Sequence[Future[TopTokens]], width: int, count: int) -> TopTokens:
    """Wait for the top tokens of some responses; log a line every minute.

    Args:
        pending: results of :meth:`RemoteTeacher.request`.
        width: T of the result.
        count: K, number of tokens of each distribution.

    Returns:
        (B, T, K) top tokens, padded with zeros; one row for no response.

    Raises:
        RuntimeError: a server does not answer, or rejects a text.
    """
    by_row = results_logged(pending, "texts with the teacher's log-probabilities")
    shape = max(1, len(pending)), width, count
    total = TopTokens(torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(shape[:2]))
    for row, tokens in enumerate(by_row):
        for padded, values in zip(vars(total).values(), vars(tokens).values(), strict=True):
            padded[row, : len(values)] = values
    return total
