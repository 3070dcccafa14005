"""Record of a conversation of the policy with an environment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ConversationRecord:
    """Record of a conversation with an environment: its messages, rewards and counts.

    Args:
        prompt_ids: tokens of the prompt with the messages that the environment appended to it at the start.
        messages: messages behind the prompt, of policy and environment.
        turn_ends: number of tokens behind the prompt after each turn of the policy.
        turn_rewards: reward of each turn; the first contains that of the start.
        stop: reason of the end: ``done`` (the environment or agent ended it), ``max_turns``, ``truncated`` (a limit cut
            a turn), ``tokens`` (none were left for another turn), ``malformed`` (the bridge could not continue the
            turn) or ``fault``.
        tool_calls: number of tool calls.
        malformed: number of turns with a tool call that could not be parsed.
        fault: kind of the environment's failure; None without one.
        metrics: numbers that the environment logged, summed over its replies.
        environment_s: seconds in which the environment was called.
        text_starts: number of tokens behind the prompt before each further branch of an agent, which begins there with
            its prompt.
    """

    prompt_ids: list[int]
    messages: list[dict[str, Any]]
    turn_ends: list[int]
    turn_rewards: list[float]
    stop: str
    tool_calls: int = 0
    malformed: int = 0
    fault: str | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    environment_s: float = 0.0
    text_starts: list[int] = dataclasses.field(default_factory=list)
