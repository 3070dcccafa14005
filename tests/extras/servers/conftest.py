import pytest

from tests.extras.servers.stub_server import valid_server


@pytest.fixture
def stubs(tmp_path):
    """Two valid servers."""
    started = [valid_server(tmp_path / str(number)) for number in range(2)]
    yield started
    for server in started:
        server.close()
