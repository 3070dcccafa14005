"""Real vLLM engines, started once and all at the same time, because a start takes half a minute."""

import dataclasses

import pytest

from lightning_rlhf.rollout.vllm_engine import VLLMEngine, vllm_installed
from tests.rollout.engines import setup_of, source_of


@dataclasses.dataclass
class Engines:
    tied: VLLMEngine
    fresh: VLLMEngine  # the same as ``tied``, used for one thing only, then killed
    untied: VLLMEngine
    broken: VLLMEngine  # cannot start


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    found = Engines(VLLMEngine(), VLLMEngine(), VLLMEngine(), VLLMEngine(arguments={"max_model_len": 100_000}))
    untied = source_of(model_type="qwen2", tie_word_embeddings=False)
    for name, engine in vars(found).items():
        engine.start(setup_of(untied if name == "untied" else source_of(), tmp_path_factory.mktemp(name)))
    yield found
    for engine in vars(found).values():
        engine.close()
