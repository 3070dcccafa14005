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
def make_cluster(tmp_path, monkeypatch):
    """Build an engine of several servers with weights of version 1; it soon looks at a failed server again."""
    monkeypatch.setattr(servers, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(servers, "_RETRY_SECONDS", 0.02)
    made = []

    def make_cluster(urls, **arguments):
        engine = VLLMServerEngine(urls, **{"timeout": 10, **arguments})
        made.append(engine)
        engine.start(setup_of(source_of(), tmp_path / "ours"))
        engine.wait()
        engine.update_weights(PARAMETERS, 1)
        return engine

    yield make_cluster
    for engine in made:
        engine.close()


@pytest.fixture
def cluster(make_cluster, stubs):
    return make_cluster([stub.url for stub in stubs])


@pytest.fixture
def stub(tmp_path):
    """One valid server."""
    server = valid_server(tmp_path)
    yield server
    server.close()


@pytest.fixture
def make(stub, tmp_path):
    """Build an engine of one server and start it."""
    made = []

    def make(url=None, **arguments):
        made.append(VLLMServerEngine(url or stub.url, **{"timeout": 20, **arguments}))
        made[-1].start(setup_of(source_of(), tmp_path / "ours"))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make):
    """An engine of one server with weights of version 7."""
    engine = make()
    assert engine.wait() == f"vLLM 0.32.0 at {engine._addresses}"
    engine.update_weights(PARAMETERS, 7)
    return engine
