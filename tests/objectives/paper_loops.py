"""Parts of the formulas of policy losses as loops over responses; the tests of each family contain its cases.

The loops use no masks, clamps or tensors of tokens: they multiply the probabilities of a list of tokens, and autograd
differentiates the result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_rlhf.objectives.aggregation import Aggregation
from lightning_rlhf.objectives.base import PolicyLoss
from tests.helpers import float64


class Case(NamedTuple):
    loss: PolicyLoss
    aggregation: Aggregation
    paper: Callable[[list[Any]], Any]
    whole: bool = False  # one advantage for a response


def bounded(value, low, high):
    return min(max(value, float64(low)), float64(high))


def clipped(ratio, a, low, high):
    return -min(ratio * a, bounded(ratio, 1 - low, 1 + high) * a)


def ppo(new, old, a, selected_tokens):
    loss = clipped((new - old).exp(), a, 0.1, 0.4)
    return min(loss, -a * 1.5) if a < 0 else loss


def over_tokens(of_token):
    """Return the mean over all tokens."""

    def of_batch(responses):
        losses = [of_token(*token) for response in responses for token in zip(*response, strict=True)]
        return sum(losses) / max(len(losses), 1)

    return of_batch


def over_responses(of_response):
    """Return the mean over responses that have a token."""

    def of_batch(responses):
        return sum(of_response(*response) for response in responses) / max(len(responses), 1)

    return of_batch


def of_mean_token(of_token):
    """Return a response's loss: the mean over its tokens."""
    return lambda *response: sum(of_token(*token) for token in zip(*response, strict=True)) / len(response[0])
