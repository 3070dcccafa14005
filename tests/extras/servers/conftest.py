import pytest

from lightning_rlhf.extras.servers import servers
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from tests.extras.servers.several import PARAMETERS
from tests.extras.servers.stub_server import valid_server
from tests.rollout.engines import setup_of, source_of


@pytest.fixture
def stubs(tmp_path):
    """Two valid servers."""
    started = [valid_server(tmp_path / str(number)) for number in range(2)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Build an engine with weights of version 1, which soon looks at a server that failed again."""
    monkeypatch.setattr(servers, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(servers, "_RETRY_SECONDS", 0.02)
    made = []

    def make(urls, **arguments):
        engine = VLLMServerEngine(urls, **{"timeout": 10, **arguments})
        made.append(engine)
        engine.start(setup_of(source_of(), tmp_path / "ours"))
        engine.wait()
        engine.update_weights(PARAMETERS, 1)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make, stubs):
    return make([stub.url for stub in stubs])
