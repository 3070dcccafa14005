"""Tokens, masks and ends of conversations."""

import pytest

from lightning_rlhf.environments.conversation import Conversation, Limits
from lightning_rlhf.types import Completion, TokenPrompt


def turn(ids, stop="stop", version=0):
    return Completion(list(ids), [-0.5 * i for i in ids], stop, version)


def test_conversation_of_two_turns_worked_by_hand():
    conversation = Conversation(TokenPrompt([1, 2]), Limits(max_turns=3, max_response_tokens=10))
    conversation.add_turn(turn([3, 4]))
    assert list(conversation.request) == [1, 2, 3, 4]
    assert conversation.last_turn == ([3, 4], [1, 2])
    conversation.add_written([7, 8, 9])
    assert list(conversation.request) == [1, 2, 3, 4, 7, 8, 9]
    assert conversation.turn_budget == 5
    conversation.add_turn(turn([5], version=1))
    assert conversation.last_turn == ([5], [1, 2, 3, 4, 7, 8, 9])
    conversation.end("done")
    whole = conversation.completion
    assert whole.token_ids == [3, 4, 7, 8, 9, 5]
    assert whole.sampled == (True, True, False, False, False, True)
    assert whole.logprobs == [-1.5, -2.0, 0, 0, 0, -2.5]
    assert whole.token_versions == [0, 0, 0, 0, 0, 1]
    assert (whole.finish_reason, conversation.turn_ends) == ("stop", [2, 6])


@pytest.mark.parametrize(
    ("limits", "written", "stop", "reason"),
    [
        (Limits(1, 10), [7], "max_turns", "stop"),
        (Limits(3, 4), [7, 8], "tokens", "length"),  # no token is left for another turn
        (Limits(3, 5), [7, 8], None, None),
        (Limits(3, 10), None, "malformed", "stop"),  # the bridge cannot continue the turn
        (Limits(1, 10), None, "max_turns", "stop"),
    ],
)
def test_messages_after_the_last_turn_are_not_part_of_the_row(limits, written, stop, reason):
    conversation = Conversation(TokenPrompt([1]), limits)
    conversation.add_turn(turn([3, 4]))
    conversation.add_written(written)
    assert conversation.stop == stop
    if stop is not None:
        assert conversation.completion.token_ids == [3, 4]
        assert conversation.completion.finish_reason == reason


def test_turn_truncated_by_its_limit_ends_the_conversation():
    conversation = Conversation(TokenPrompt([1]), Limits(3, 10, max_turn_tokens=2))
    assert conversation.turn_budget == 2
    conversation.add_turn(turn([3, 4], stop="length"))
    assert (conversation.stop, conversation.completion.finish_reason) == ("truncated", "length")
    with pytest.raises(ValueError, match=r"^the conversation has ended \(truncated\)$"):
        conversation.add_turn(turn([3]))


def test_turn_longer_than_its_budget_is_rejected():
    with pytest.raises(ValueError, match=r"^a turn has 3 tokens, at most 2 are allowed$"):
        Conversation(TokenPrompt([1]), Limits(3, 10, max_turn_tokens=2)).add_turn(turn([3, 4, 5]))


def test_first_end_counts():
    conversation = Conversation(TokenPrompt([1]), Limits(3, 10))
    conversation.add_turn(turn([3]))
    conversation.end("done")
    conversation.end("fault")
    assert conversation.stop == "done"


def test_conversation_without_an_end_has_no_completion():
    conversation = Conversation(TokenPrompt([1]), Limits(3, 10))
    for _ in range(2):
        with pytest.raises(ValueError, match="without an end or without a turn"):
            _ = conversation.completion
        conversation.end("fault")
