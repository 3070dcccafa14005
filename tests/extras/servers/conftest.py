import pytest

from lightning_rlhf.extras.servers import servers
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from tests.extras.servers.several import PARAMETERS
from tests.extras.servers.stub_server import valid_server
from tests.rollout.engines import setup_of, source_of


@pytest.fixture
def stub(tmp_path):
    """One valid server."""
    server = valid_server(tmp_path)
    yield server
    server.close()


@pytest.fixture
def stubs(tmp_path):
    """Two valid servers."""
    started = [valid_server(tmp_path / str(number)) for number in range(2)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def start_engine(tmp_path):
    """Start an engine, which has not looked at its servers yet."""
    started = []

    def start(urls, timeout=20, **arguments):
        engine = VLLMServerEngine(urls, timeout=timeout, **arguments)
        started.append(engine)
        engine.start(setup_of(source_of(), tmp_path / "ours"))
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def ready_engine(start_engine, monkeypatch):
    """Start an engine and push weights of version 1; it soon looks at a failed server again."""
    monkeypatch.setattr(servers, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(servers, "_RETRY_SECONDS", 0.02)

    def start(urls, timeout=10, **arguments):
        engine = start_engine(urls, timeout=timeout, **arguments)
        engine.wait()
        engine.update_weights(PARAMETERS, 1)
        return engine

    return start


@pytest.fixture
def cluster(ready_engine, stubs):
    """A ready engine of two servers."""
    return ready_engine([stub.url for stub in stubs])


@pytest.fixture
def engine(stub, start_engine):
    """An engine of one server with weights of version 7; it looks at the server as seldom as in a run."""
    engine = start_engine(stub.url)
    assert engine.wait() == f"vLLM 0.32.0 at {stub.url}"
    engine.update_weights(PARAMETERS, 7)
    return engine
