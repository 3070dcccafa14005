"""Real vLLM engines, started once and all at the same time, because a start takes half a minute."""

import dataclasses

import pytest

from lightning_rlhf.rollout.vllm.engine import VLLMEngine, vllm_installed
from tests.rollout.engines import setup_of, source_of


@dataclasses.dataclass
class Engines:
    tied: VLLMEngine
    fresh: VLLMEngine  # the same as ``tied``, used for one thing only, then killed
    untied: VLLMEngine
    broken: VLLMEngine  # cannot start
    forgetful: VLLMEngine  # tied, with biases; see tests/rollout/forgetful.py


@pytest.fixture(scope="session")
def fault(tmp_path_factory):
    """The file that says what the forgetful engine loses."""
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("nothing")
    return path


@pytest.fixture(scope="session")
def engines(tmp_path_factory, fault):
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    found = Engines(
        tied=VLLMEngine(),
        fresh=VLLMEngine(),
        untied=VLLMEngine(),
        broken=VLLMEngine(arguments={"max_model_len": 100_000}),
        forgetful=VLLMEngine(arguments={"worker_extension_cls": "tests.rollout.forgetful.Forgetful"}),
    )
    sources = {
        "untied": source_of(model_type="qwen2", tie_word_embeddings=False),
        "forgetful": source_of(model_type="qwen2"),
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FORGETFUL", str(fault))
        for name, engine in vars(found).items():
            engine.start(setup_of(sources.get(name, source_of()), tmp_path_factory.mktemp(name)))
    yield found
    for engine in vars(found).values():
        engine.close()
