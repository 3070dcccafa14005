"""A vLLM server that does not fit a run, or does not answer, is named with what to do before anything is generated."""

import logging
import socket
import time
from dataclasses import replace

import pytest

from lightning_rlhf.expected_errors import EngineDied, UsageError
from lightning_rlhf.extras.servers.client import VLLMServer
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.types import SamplingParams, TokenPrompt
from tests.extras.servers.several import SAMPLING
from tests.extras.servers.stub_server import serve_model
from tests.rollout.engines import setup_of, source_of

ORIGINAL = 300  # longest text of a model with Long-RoPE that has the factors of short ones


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "dtype", "torch.bfloat16", "--dtype float32, not torch.bfloat16"),
        ("model_config", "max_model_len", 100, "--max-model-len 200, not 100"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
        ("weight_transfer_config", "backend", "ipc", "--weight-transfer-config with the backend shared_memory or nccl"),
    ],
)
def test_unsuitable_server_is_rejected_with_the_required_option(start_engine, stub, part, key, value, message):
    stub.config[part][key] = value
    with pytest.raises(ValueError, match=f"does not fit this run; start it with {message}"):
        start_engine(stub.url).wait()


def test_server_with_long_rope_factors_for_long_texts_is_rejected(stub, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [9.0] * 16}
    source = source_of(max_position_embeddings=3 * ORIGINAL, rope_parameters=rope)
    engine = VLLMServerEngine(stub.url, timeout=20)
    engine.start(setup_of(source, tmp_path / "ours"))
    stub.config["model_config"]["max_model_len"] = ORIGINAL + 1
    with pytest.raises(ValueError, match=f"--max-model-len {ORIGINAL} or less, not {ORIGINAL + 1}: above it, vLLM"):
        engine.wait()
    engine.close()
    with pytest.raises(ValueError, match=f"have up to {ORIGINAL + 1}; the actor uses them for longer"):
        engine.start(replace(setup_of(source, tmp_path / "ours"), max_tokens=ORIGINAL + 1))


@pytest.mark.parametrize(
    ("dtype", "overrides", "warns"),
    [("bfloat16", {}, True), ("bfloat16", {"head_dtype": "float32"}, False), ("float32", {}, False)],
)
def test_server_that_rounds_logits_is_named_with_the_option(stub, tmp_path, caplog, dtype, overrides, warns):
    stub.config["model_config"] |= {"dtype": f"torch.{dtype}", "hf_overrides": overrides}
    engine = VLLMServerEngine(stub.url, timeout=20)
    engine.start(setup_of(replace(source_of(), dtype=dtype), tmp_path / "ours"))
    engine.wait()
    engine.close()
    assert ('start it with --hf-overrides \'{"head_dtype": "float32"}\'' in caplog.text) == warns


def test_server_that_accepts_no_weights_is_rejected(start_engine, stub):
    stub.config["weight_transfer_config"] = None
    with pytest.raises(ValueError, match="the backend shared_memory or nccl, not None"):
        start_engine(stub.url).wait()


def test_server_of_another_model_is_rejected_if_its_config_is_known(start_engine, stub, tmp_path):
    serve_model(stub, intermediate_size=64)
    with pytest.raises(
        ValueError, match=r"serves another model, .*: its intermediate_size is 64, but the actor's is 96"
    ):
        start_engine(stub.url).wait()
    stub.config["model_config"]["model"] = str(tmp_path / "nowhere")
    assert start_engine(stub.url).wait()


def test_server_without_the_routes_is_rejected_with_the_start_command(start_engine, stub):
    stub.answers["/server_info"] = 404, {"detail": "Not Found"}
    with pytest.raises(ValueError, match=r"does not have the route /server_info.*page Engines of the documentation"):
        start_engine(stub.url).wait()


def test_key_is_sent_and_a_wrong_key_is_reported(start_engine, stub, monkeypatch):
    stub.key = "right"
    monkeypatch.setenv("VLLM_API_KEY", "right")
    start_engine(stub.url).wait()
    monkeypatch.setenv("OTHER", "wrong")
    with pytest.raises(ValueError, match="rejected the API key"):
        start_engine(stub.url, key_variable="OTHER").wait()


def test_address_of_each_machine_itself_is_rejected_in_a_run_over_several(start_engine, monkeypatch):
    monkeypatch.setattr(RankGroup, "gather", lambda group, value: ["node1", "node2", "node2"])
    with pytest.raises(UsageError, match=r"^http://127.0.0.1:\d+ is another server on each of .* \(node1, node2\)"):
        start_engine("http://127.0.0.1:1")


def test_remote_server_needs_a_key(start_engine, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="is not on this machine, so it needs an API key: set it in VLLM_API_KEY"):
        start_engine("http://10.0.0.7:8000")


@pytest.fixture
def remote(stub, monkeypatch):
    """A server that seems to be on another machine, and the key that is sent to it."""
    monkeypatch.setenv("VLLM_API_KEY", "right")
    monkeypatch.setattr(VLLMServer, "is_local", False)
    return stub


def test_remote_server_must_require_the_key(start_engine, remote):
    with pytest.raises(ValueError, match="lets anyone change its weights; start it with --middleware"):
        start_engine(remote.url).wait()


def test_remote_server_must_have_the_route_that_shows_whether_it_requires_the_key(start_engine, remote):
    remote.answers["/weight_info"] = 404, {"detail": "Not Found"}
    with pytest.raises(ValueError, match="does not have the route /weight_info"):
        start_engine(remote.url).wait()


def test_remote_server_must_receive_weights_by_nccl(start_engine, remote):
    remote.key = "right"
    with pytest.raises(ValueError, match="the backend nccl, not shared_memory: it is on another machine"):
        start_engine(remote.url).wait()
    remote.config["weight_transfer_config"]["backend"] = "nccl"
    assert start_engine(remote.url).wait()


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000/", True),
        ("http://[::1]:8000", True),
        ("https://10.0.0.7", False),
        ("http://localhost.example.com", False),
    ],
)
def test_local_servers_are_recognized(url, local):
    assert VLLMServer(url, None, 1).is_local is local


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "file:///etc/passwd", "http://", "http://a/v1"])
def test_invalid_urls_are_rejected(url):
    with pytest.raises(ValueError, match=r"looks like http://127\.0\.0\.1:8000, got"):
        VLLMServerEngine(url)


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        VLLMServerEngine("http://127.0.0.1:1", ranks=0)
    with pytest.raises(ValueError, match="timeout must be positive"):
        VLLMServerEngine("http://127.0.0.1:1", timeout=0)
    engine = VLLMServerEngine("http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"temperatures from 0\.01 to 2\.0, got 3"):
        engine.check(SamplingParams(1, 3.0))
    with pytest.raises(RuntimeError, match="not running"):
        engine.request([TokenPrompt([5])], [SAMPLING], [0])


def test_unreachable_server_is_retried_until_the_timeout(start_engine):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        engine, began = start_engine(f"http://127.0.0.1:{unused.getsockname()[1]}", timeout=1.5), time.monotonic()
        with pytest.raises(EngineDied, match=r"cannot be reached \(.*refused\); the page Engines"):
            engine.wait()
    assert 1.5 < time.monotonic() - began < 6


@pytest.mark.slow
def test_waiting_for_a_server_is_logged(start_engine, stub, monkeypatch, caplog):
    monkeypatch.setattr("lightning_rlhf.extras.servers.engine._HEARTBEAT_SECONDS", 0)
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    caplog.set_level("INFO", "lightning_rlhf")
    answers = iter([None, None, (200, {})])  # None breaks the connection
    stub.answers["/health"] = lambda body: next(answers)
    assert start_engine(stub.url).wait()
    assert f"s: the vLLM server at {stub.url} cannot be reached" in caplog.text
