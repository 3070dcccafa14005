"""Responses as lines of files: the segments of a conversation, and why a response ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.types import ConversationRecord, Rollout


def segments_of(
    tokenizer: PreTrainedTokenizerBase, rollout: Rollout, row: int, image_tokens: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the parts of a response that policy and environment wrote in turns; nothing without an environment's part.

    For example ``{"segments": [{"from": "policy", "text": "<call>", "reward": 0.5}, {"from": "environment", "text":
    "3"}, {"from": "policy", "text": "It is 3."}]}``: a turn has its ``reward``, times the weight of the environment, if
    it is not 0. That of the last turn is part of the response's reward, which the line has anyway.

    Args:
        tokenizer: tokenizer that decodes them, special tokens included.
        rollout: rollout of the step, on the CPU.
        row: number of the response.
        image_tokens: tokens that stand for the parts of an image, which are written once for successive parts.
    """
    length = int(rollout.response_lengths[row])
    mask = rollout.response_mask[row, :length].tolist()
    if all(mask):
        return {}
    if rollout.conversation is None:  # a user's own loop masks tokens without an environment
        rewards = [0.0] * length
    else:
        rewards = rollout.conversation.step_rewards[row, :length].tolist()
    tokens = zip(mask, rollout.response_ids[row, :length].tolist(), rewards, strict=True)
    segments = []
    for sampled, part in groupby(tokens, key=itemgetter(0)):
        _, all_ids, values = zip(*part, strict=True)
        ids = _once_for_each_image(all_ids, image_tokens)
        reward = {"reward": sum(values)} if any(values) else {}
        segments.append({"from": "policy" if sampled else "environment", "text": tokenizer.decode(ids), **reward})
    return {"segments": segments}


def _once_for_each_image(ids: Sequence[int], image_tokens: Sequence[int]) -> list[int]:
    """Return ids in which successive tokens of an image are one: 5 9 9 9 6 becomes 5 9 6 if 9 stands for its parts."""
    pairs = zip((None, *ids), ids, strict=False)
    return [token for before, token in pairs if token != before or token not in image_tokens]


def end_of(truncated: bool, record: ConversationRecord | None, is_given: bool = False) -> dict[str, Any]:
    """Return why a response ended, and the numbers of turns and tool calls of a conversation.

    Args:
        truncated: whether the length limit cut the response.
        record: record of a conversation with an environment; None without one.
        is_given: whether it is a response of the data.
    """
    if is_given:
        return {"stop": "given"}
    if record is None:
        return {"stop": "length" if truncated else "stop"}
    return {"stop": record.stop, "turns": len(record.turn_ends), "tool_calls": record.tool_calls}
