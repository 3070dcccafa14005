"""The messages of errors are those of tests/golden/messages.txt, which is read as text in a review."""

from tests.messages import GOLDEN, messages


def test_messages_are_those_that_were_reviewed():
    assert messages() == GOLDEN.read_text().splitlines(), "run python -m tests.messages and review its change"
