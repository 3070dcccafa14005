import pytest

from tests.cli.conftest import _elsewhere, cli, config, fit

__all__ = ["_elsewhere", "chat", "cli", "config", "fit"]


@pytest.fixture
def chat():
    """Start servers on the loopback; each gets a function of the question's text that returns the answer."""
    pytest.importorskip("httpx")
    pytest.importorskip("tenacity")
    from tests.extras.judges.chat_stub import ChatStub

    started = []

    def start(answer):
        started.append(ChatStub(answer))
        return started[-1]

    yield start
    for stub in started:
        stub.close()
