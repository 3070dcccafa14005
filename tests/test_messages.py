"""The messages of expected errors equal tests/golden/messages.txt, so that changes of wording are reviewed as text."""

from tests.messages import GOLDEN, messages


def test_messages_equal_the_reviewed_file():
    assert messages() == GOLDEN.read_text().splitlines(), "run python -m tests.messages and review its change"
