"""vLLM engines for the whole session; each starts when a test first uses it, because a start takes half a minute."""

from functools import cached_property
from unittest.mock import patch

import pytest

from lightning_rlhf.rollout.vllm import engine as vllm_engine
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.rollout.vllm.supervisor import EngineProcess
from tests.rollout.engines import setup_of, source_of


class Engines:
    """Engines by their purpose; all except `tied` and `broken` belong to slow tests."""

    def __init__(self, make_directory, fault):
        self.make_directory = make_directory
        self.fault = fault
        self.pause = make_directory("pause") / "pause"
        self.started = []

    @cached_property
    def tied(self):
        """An engine that waits after finished responses while the file `pause` exists."""

        def start_process(module, *arguments):
            return EngineProcess("tests.rollout.pausing_worker", *arguments)

        with pytest.MonkeyPatch.context() as environment, patch.object(vllm_engine, "EngineProcess", start_process):
            environment.setenv("PAUSE", str(self.pause))
            return self.start(source_of())

    @cached_property
    def fresh(self):
        """An engine like `tied`, used for one test and then killed."""
        return self.start(source_of())

    @cached_property
    def untied(self):
        return self.start(source_of(model_type="qwen2", tie_word_embeddings=False))

    @cached_property
    def broken(self):
        """An engine that cannot start."""
        return self.start(source_of(), max_model_len=100_000)

    @cached_property
    def lossy(self):
        """A tied model with biases that loses weights; see tests/rollout/forgetful.py."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("FORGETFUL", str(self.fault))
            source = source_of(model_type="qwen2")
            return self.start(source, worker_extension_cls="tests.rollout.forgetful.Forgetful")

    def start(self, source, **arguments):
        engine = VLLMEngine(arguments=arguments or None)
        engine.start(setup_of(source, self.make_directory("engine")))
        self.started.append(engine)
        return engine


@pytest.fixture(scope="session")
def fault(tmp_path_factory):
    """The file with the fault of the engine that loses weights."""
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("nothing")
    return path


@pytest.fixture(scope="session")
def engines(tmp_path_factory, fault):
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    result = Engines(tmp_path_factory.mktemp, fault)
    yield result
    for engine in result.started:
        engine.close()
