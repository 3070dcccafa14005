"""A vLLM server as engine: every fault gives a one-line error, and all responses are from the last pushed weights."""

import functools
import logging
import socket
import sys
import threading
import time
import types
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.environments.bridges import PlainBridge
from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError
from lightning_rlhf.extras.servers.client import VLLMServer
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.extras.servers.push import (
    NCCLTransport,
    SharedMemoryTransport,
    WeightPush,
    _chunk_source,
    _rendezvous,
)
from lightning_rlhf.rollout.conversations import ConversationRequest, ConversationSampler
from lightning_rlhf.rollout.generation import CompletionCheck, generate, serve, submit
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from lightning_rlhf.types import Prompt, PromptImages, SamplingParams, TokenPrompt
from tests.environments.worlds import Echo
from tests.extras.servers.stub_server import valid_server
from tests.rollout.engines import setup_of, source_of
from tests.vision_models import drawing

SAMPLING = SamplingParams(4, temperature=0.5, top_p=0.9, top_k=7, stop_token_ids=(2, 3))
PARAMETERS = [("w", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2))]


@pytest.fixture
def stub(tmp_path):
    """A valid server."""
    server = valid_server(tmp_path)
    yield server
    server.close()


@pytest.fixture
def make(stub, tmp_path):
    """Build an engine and start it."""
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
    """An engine whose server has received weights."""
    engine = make()
    assert engine.wait() == f"vLLM 0.32.0 at {engine._addresses}"
    engine.update_weights(PARAMETERS, 7)
    return engine


def test_push_waits_for_requests_and_clears_the_prefix_cache(engine, stub):
    engine.update_weights(PARAMETERS, 8)
    paths = stub.paths()[-7:]
    assert paths == [
        "/pause?mode=wait",
        "/update_weight_version",
        "/start_weight_update",
        "/update_weights",
        "/reset_prefix_cache",
        "/finish_weight_update",
        "/resume",
    ]
    assert stub.paths().count("/init_weight_transfer_engine") == 1
    assert stub.requested[-6][1]["new_version"].startswith("unfinished run ")
    assert stub.requested[-2][1]["weight_version"].endswith(", version 8")
    assert engine.first_difference(PARAMETERS) is None
    assert engine.first_difference([("w", torch.zeros(2, 3)), PARAMETERS[1]]) == "w"


def test_push_to_a_server_that_reads_images_keeps_them_and_resets_their_features(stub):
    push = WeightPush(SharedMemoryTransport(), has_images=True)
    push([VLLMServer(stub.url, None, 20)], PARAMETERS, "7")
    push.close()
    paths = stub.paths()
    assert paths[0] == "/pause?mode=wait&clear_cache=false"
    assert paths.index("/reset_prefix_cache") < paths.index("/reset_encoder_cache")
    assert paths.index("/reset_encoder_cache") < paths.index("/finish_weight_update")


def test_images_are_sent_with_their_files_until_the_server_has_them(engine, stub):
    image = EncodedImage("ab" * 32, 8, 8, data=drawing(1).data)
    answer, known = stub.answers["/inference/v1/generate"], set()

    def generate_with_images(body):
        parts = body["content_parts"]
        if any(part["url"] is None and part["uuid"] not in known for part in parts):
            return 400, {"error": {"message": "cache miss"}}
        known.update(part["uuid"] for part in parts)
        status, response = answer(body)
        return status, {**response, "prompt_token_ids": [4, 9, 9, 5]}

    stub.answers["/inference/v1/generate"] = generate_with_images
    prompt = TokenPrompt([4, 9, 9, 5], PromptImages((image,), (0,), (4, 9, 5)))
    generate(engine, [prompt] * 5, SAMPLING, range(5))
    generate(engine, [prompt], SAMPLING, [0])
    known.clear()
    generate(engine, [prompt], SAMPLING, [0])
    bodies = [body for path, body in stub.requested if path.endswith("generate")]
    urls = [body["content_parts"][0]["url"] for body in bodies]
    assert urls == [image.data_url(), *[None] * 7, image.data_url()]
    first, *others = [body["sampling_params"] for body in bodies[:6]]
    (same,) = [each for each in others if each["seed"] == first["seed"]]  # threads send the responses in any order
    assert first == {**same, "max_tokens": 1, "prompt_logprobs": None}
    assert {tuple(body["token_ids"]) for body in bodies} == {(4, 9, 5)}
    with pytest.raises(RunError, match=r"expands a prompt with 1 images to 4 tokens and the trainer to 5; token 3"):
        generate(engine, [replace(prompt, token_ids=[4, 9, 9, 9, 5])], SAMPLING, [0])


def test_request_has_all_fields_and_answers_keep_their_order(engine, stub):
    prompts = [[number % 60, 1, 1][: number % 7 % 3 + 1] for number in range(300)]
    completions = generate(engine, prompts, SAMPLING, range(300))
    assert [c.token_ids for c in completions] == [[prompt[0]] * len(prompt) for prompt in prompts]
    assert {(*c.logprobs[:1], c.finish_reason, c.policy_version) for c in completions} == {(-0.5, "stop", 7)}
    sent = (body for path, body in stub.requested if path.endswith("generate"))
    (body,) = (body for body in sent if body["sampling_params"]["seed"] == 3)
    assert body["token_ids"] == prompts[3]
    assert body["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop_token_ids": [2, 3],
        "seed": 3,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
    }
    assert generate(engine, [], SAMPLING, []) == []


def test_echo_requests_the_log_probabilities_of_the_prompt_and_returns_them_first(engine, stub):
    answer = stub.answers["/inference/v1/generate"]
    echoed = [None, {"5": {"logprob": -3.5, "rank": 2}}, {"4": {"logprob": -0.25, "rank": 1}}]
    stub.answers["/inference/v1/generate"] = lambda body: (200, {**answer(body)[1], "prompt_logprobs": echoed})
    (completion,) = generate(engine, [[3, 5, 4]], replace(SAMPLING, echo=True), [0])
    assert stub.requested[-1][1]["sampling_params"]["prompt_logprobs"] == 0
    assert completion.token_ids == [5, 4, 3, 3, 3]
    assert completion.logprobs == [-3.5, -0.25, -0.5, -0.5, -0.5]


def test_push_waits_for_previously_requested_responses(engine, stub):
    answer, requested, answered = stub.answers["/inference/v1/generate"], threading.Event(), threading.Event()

    def slow(body):
        requested.set()
        answered.wait(20)
        return answer(body)

    stub.answers["/inference/v1/generate"] = slow
    finished = []
    generation = submit(engine, [[5], [6, 1]], SAMPLING, [1, 2], lambda *result: finished.append(result))
    requested.wait(20)
    assert engine.traits.overlaps
    assert generation.finished_at is None
    threading.Timer(0.2, answered.set).start()
    engine.update_weights(PARAMETERS, 8)
    assert generation.finished_at is not None
    assert "/pause?mode=wait" in stub.paths()[stub.paths().index("/inference/v1/generate") :]
    assert [(completion.token_ids, completion.policy_version) for completion in generation.result()] == [
        ([5], 7),
        ([6, 6], 7),
    ]
    assert sorted(finished, key=lambda result: result[0]) == list(enumerate(generation.result()))
    assert submit(engine, [[5]], SAMPLING, [1]).result()[0].policy_version == 8


def test_conversations_are_sent_as_requests_of_single_turns(engine, stub):
    answer = stub.answers["/inference/v1/generate"]

    def two_tokens_and_an_end(body):
        code, result = answer({"token_ids": [5, 5, 5]})
        result["choices"][0]["token_ids"] = [5, 6, 2]
        return code, result

    stub.answers["/inference/v1/generate"] = two_tokens_and_an_end
    tokenizer = CharacterTokenizer("abcdefgh").load()
    sampler = ConversationSampler(
        EnvironmentSettings(Echo, bridge="plain", max_turns=2, max_turn_tokens=4, timeout_s=None),
        PlainBridge(tokenizer),
        tokenizer,
    )
    sampling = replace(SAMPLING, max_tokens=9)
    requested = [
        ConversationRequest(Prompt([number], ""), 0, (number, 100 + number), sampling) for number in range(3, 40)
    ]
    generation = serve(engine, requested, partial(sampler, check=CompletionCheck(9, 7, 20)))
    rows = generation.result()
    sampler.close()
    bodies = [body for path, body in stub.requested if path.endswith("generate")]
    assert len(bodies) == 2 * len(requested)
    for request, row in zip(requested, rows, strict=True):
        instance = [body for body in bodies if body["token_ids"][0] == request.prompt.token_ids[0]]
        first, second = sorted(instance, key=lambda body: body["sampling_params"]["seed"])
        assert tuple(body["sampling_params"]["seed"] for body in (first, second)) == request.turn_seeds
        assert second["token_ids"] == [*request.prompt.token_ids, *row.token_ids[: row.sampled.index(False) + 2]]
        assert (first["sampling_params"]["max_tokens"], second["sampling_params"]["max_tokens"]) == (4, 4)
        assert (row.policy_version, row.conversation.turn_ends, row.sampled.count(False)) == (7, [3, 8], 2)


def test_server_that_was_restarted_gets_the_weights_of_the_last_push_again(engine, stub):
    stub.version = "default"
    assert generate(engine, [[5]], SAMPLING, [0])[0].policy_version == 7
    assert stub.paths().count("/update_weights") == 2
    assert engine.restarted == 1


def test_server_to_which_another_run_pushes_is_rejected(engine, stub):
    stub.version = "run 1234, version 7"
    with pytest.raises(EngineDied, match=r"another run pushes weights to the vLLM server .* .'run 1234, version 7'."):
        generate(engine, [[5]], SAMPLING, [0])


def test_answer_that_started_with_old_weights_is_rejected(engine, stub):
    answer = stub.answers["/inference/v1/generate"]

    def mixed(body):
        status, result = answer(body)
        result["choices"][0]["weight_versions"].insert(0, {"version": "old", "start": 0, "end": 0})
        return status, result

    stub.answers["/inference/v1/generate"] = mixed
    with pytest.raises(EngineDied, match=r"generated with the weights \['old', 'run"):
        generate(engine, [[5]], SAMPLING, [0])


def test_generation_before_the_first_push_raises(make):
    engine = make()
    engine.wait()
    with pytest.raises(RunError, match="have no weights yet: call update_weights"):
        generate(engine, [[5]], SAMPLING, [0])


def test_aborted_response_raises(engine, stub):
    answer = stub.answers["/inference/v1/generate"]

    def aborted(body):
        status, result = answer(body)
        result["choices"][0]["finish_reason"] = "abort"
        return status, result

    stub.answers["/inference/v1/generate"] = aborted
    with pytest.raises(EngineDied, match=r"aborted a response \(abort\)"):
        generate(engine, [[5]], SAMPLING, [0])


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
def test_unsuitable_server_is_rejected_with_the_required_option(make, stub, part, key, value, message):
    stub.config[part][key] = value
    with pytest.raises(ValueError, match=f"does not fit this run; start it with {message}"):
        make().wait()


def test_server_with_long_rope_factors_for_long_texts_is_rejected(stub, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 300}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [9.0] * 16}
    source = source_of(max_position_embeddings=900, rope_parameters=rope)
    engine = VLLMServerEngine(stub.url, timeout=20)
    engine.start(setup_of(source, tmp_path / "ours"))
    stub.config["model_config"]["max_model_len"] = 301
    with pytest.raises(ValueError, match="start it with --max-model-len 300 or less, not 301: above it, vLLM computes"):
        engine.wait()
    engine.close()
    with pytest.raises(ValueError, match="have up to 301; the actor uses them for longer"):
        engine.start(replace(setup_of(source, tmp_path / "ours"), max_tokens=301))


def test_server_that_accepts_no_weights_is_rejected(make, stub):
    stub.config["weight_transfer_config"] = None
    with pytest.raises(ValueError, match="the backend shared_memory or nccl, not None"):
        make().wait()


def test_server_of_another_model_is_rejected_if_its_config_is_known(make, stub, tmp_path):
    setup_of(source_of(intermediate_size=64), tmp_path / "served")
    with pytest.raises(
        ValueError, match=r"serves another model, .*: its intermediate_size is 64, but the actor's is 96"
    ):
        make().wait()
    stub.config["model_config"]["model"] = str(tmp_path / "nowhere")
    assert make().wait()


def test_server_without_the_routes_is_rejected_with_the_start_command(make, stub):
    stub.answers["/server_info"] = 404, {"detail": "Not Found"}
    with pytest.raises(ValueError, match=r"does not have the route /server_info.*page Engines of the documentation"):
        make().wait()


def test_key_is_sent_and_a_wrong_key_is_reported(make, stub, monkeypatch):
    stub.key = "right"
    monkeypatch.setenv("VLLM_API_KEY", "right")
    make().wait()
    monkeypatch.setenv("OTHER", "wrong")
    with pytest.raises(ValueError, match="rejected the API key"):
        make(key_variable="OTHER").wait()


def test_address_of_each_machine_itself_is_rejected_in_a_run_over_several(make, monkeypatch):
    monkeypatch.setattr(RankGroup, "gather", lambda group, value: ["node1", "node2", "node2"])
    with pytest.raises(UsageError, match=r"^http://127.0.0.1:\d+ is another server on each of .* \(node1, node2\)"):
        make()


def test_remote_server_must_require_a_key_on_every_route(make, stub, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="is not on this machine, so it needs an API key: set it in VLLM_API_KEY"):
        make("http://10.0.0.7:8000")
    monkeypatch.setenv("VLLM_API_KEY", "right")
    monkeypatch.setattr(VLLMServer, "is_local", False)
    with pytest.raises(ValueError, match="lets anyone change its weights; start it with --middleware"):
        make().wait()
    stub.answers["/weight_info"] = 404, {"detail": "Not Found"}  # no proof that other routes need a key
    with pytest.raises(ValueError, match="does not have the route /weight_info"):
        make().wait()
    stub.key = "right"
    with pytest.raises(ValueError, match="the backend nccl, not shared_memory: it is on another machine"):
        make().wait()
    stub.config["weight_transfer_config"]["backend"] = "nccl"
    make().wait()


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


def test_unreachable_server_is_retried_until_the_timeout(make):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        engine, began = make(f"http://127.0.0.1:{unused.getsockname()[1]}", timeout=1.5), time.monotonic()
        with pytest.raises(EngineDied, match=r"cannot be reached \(.*refused\); the page Engines"):
            engine.wait()
    assert 1.5 < time.monotonic() - began < 6


@pytest.mark.slow
def test_waiting_for_a_server_is_logged(make, stub, monkeypatch, caplog):
    monkeypatch.setattr("lightning_rlhf.extras.servers.engine._HEARTBEAT_SECONDS", 0)
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    caplog.set_level("INFO", "lightning_rlhf")
    requested = []
    stub.answers["/health"] = lambda body: (200, {}) if len(requested) > 1 else requested.append(1)
    assert make().wait()
    assert f"s: the vLLM server at {stub.url} cannot be reached" in caplog.text


def test_broken_connection_raises_immediately(engine, stub):
    stub.answers["/inference/v1/generate"] = lambda body: None if body["token_ids"] == [1] else time.sleep(3)
    began = time.monotonic()
    with pytest.raises(EngineDied, match=f"the vLLM server at {stub.url} cannot be reached"):
        generate(engine, [[0], [1], [2]], SAMPLING, range(3))
    assert time.monotonic() - began < 2


@pytest.mark.slow
def test_hanging_server_raises_after_the_timeout_and_waiting_is_logged(engine, stub, monkeypatch, caplog):
    monkeypatch.setattr("lightning_rlhf.processes.waiting.INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    monkeypatch.setattr(engine._running.members[0].server, "_timeout", 1.0)
    caplog.set_level("INFO", "lightning_rlhf")
    stub.answers["/inference/v1/generate"] = lambda body: time.sleep(2)
    with pytest.raises(EngineDied, match="no response for 1 s"):
        generate(engine, [[0], [1]], SAMPLING, range(2))
    assert f"Waiting for 2 of 2 completions for 0 s; the vLLM servers are {stub.url}." in caplog.text


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": {"message": "too long"}}, RunError, "rejected the request: too long"),
        (
            403,
            {"error": {"message": "Scale-out is off"}},
            UsageError,
            "does not have the route .*generate .Scale-out is off",
        ),
        (
            500,
            {"error": {"message": "EngineDead"}},
            EngineDied,
            "failed at .*generate: EngineDead; see the server's log",
        ),
        (502, b"<html>", EngineDied, "failed at .*: <html>"),
    ],
)
def test_error_message_of_the_server_is_shown(engine, stub, status, body, kind, message):
    stub.answers["/inference/v1/generate"] = status, body
    with pytest.raises(kind, match=message) as error:
        generate(engine, [[0]], SAMPLING, [0])
    assert type(error.value) is kind


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_failed_push_is_repeated_up_to_max_restarts(engine, stub, path, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.extras.servers.servers._RETRY_SECONDS", 0.02)
    stub.answers[path] = 500, {"error": {"message": "out of cheese"}}
    with pytest.raises(EngineDied, match=f"failed at {path}: out of cheese"):
        engine.update_weights(PARAMETERS, 8)
    assert stub.paths()[-1] == "/resume"
    assert stub.paths().count(path) == 5  # the first push, the second one, and three after failures
    assert stub.version.startswith("unfinished run ")
    with pytest.raises(EngineDied, match=f"failed at {path}: out of cheese"):
        generate(engine, [[5]], SAMPLING, [0])


def test_update_that_failed_is_ended_before_the_next_one(stub):
    push, server = WeightPush(SharedMemoryTransport()), VLLMServer(stub.url, None, 10)
    steps = ["/start_weight_update", "/update_weights", "/finish_weight_update"]

    def steps_of(label):
        stub.requested.clear()
        failed = push([server], PARAMETERS, label)
        return [path for path in stub.paths() if path in steps], bool(failed)

    assert steps_of("one") == (steps, False)
    stub.answers["/update_weights"] = 500, {"error": {"message": "out of memory"}}
    assert steps_of("two") == (steps[:2], True)
    stub.answers["/update_weights"] = 200, {"message": "done"}
    assert steps_of("three") == ([steps[0], steps[2], *steps], False)
    assert steps_of("four") == (steps, False)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [((500, {"error": {"message": "gone"}}), None), ((400, {"error": {"message": "no"}}), RunError)],
)
def test_failed_server_is_disconnected_before_the_next_part_is_sent(stub, answer, raised, monkeypatch):
    events = []

    class Parts(SharedMemoryTransport):
        def parts(self, parameters):
            for number in range(2):
                events.append(number)
                yield super().last_weights() if number else next(super().parts(parameters))

        def disconnect(self, server):
            events.append("disconnected")

    stub.answers["/update_weights"] = answer
    with pytest.raises(raised) if raised else nullcontext():
        WeightPush(Parts())([VLLMServer(stub.url, None, 10)], PARAMETERS, "one")
    assert events == ([0, "disconnected"] if raised else [0, "disconnected", 1])


@pytest.mark.parametrize("error", [ModuleNotFoundError("vllm"), OSError("no address"), KeyboardInterrupt()])
def test_server_continues_after_a_push_that_ends_with_any_error(stub, monkeypatch, error):
    def connect(transport, server):
        raise error

    monkeypatch.setattr(SharedMemoryTransport, "connect", connect)
    with pytest.raises(type(error)):
        WeightPush(SharedMemoryTransport())([VLLMServer(stub.url, None, 10)], PARAMETERS, "one")
    assert stub.paths()[-1] == "/resume"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rendezvous_has_the_address_family_of_the_server(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        try:
            listening.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no address {address}")
        listening.listen()
        server = types.SimpleNamespace(host=address, port=listening.getsockname()[1])
        assert _rendezvous(server)[0] == address


def test_parameters_are_exhausted_even_if_the_server_is_gone(engine, stub, monkeypatch):
    monkeypatch.setattr(engine._running, "longest_wait", 0.5)
    stub.close()
    parameters = iter(PARAMETERS)
    with pytest.raises(EngineDied, match="cannot be reached"):
        engine.update_weights(parameters, 8)
    assert list(parameters) == []


def test_kept_prefix_cache_raises(engine, stub):
    stub.answers["/reset_prefix_cache"] = 200, {"success": False}
    with pytest.raises(RuntimeError, match="kept the prefix cache"):
        engine.update_weights(PARAMETERS, 8)


def test_unfinished_push_of_another_trainer_is_ended_first(engine, stub):
    refused = []

    def start(body):
        if refused:
            return 200, {"message": "done"}
        refused.append(body)
        return 500, {"error": {"message": "a weight update is already active"}}

    stub.answers["/start_weight_update"] = start
    engine.update_weights(PARAMETERS, 8)
    assert stub.paths()[-7:-3] == [
        "/start_weight_update",
        "/finish_weight_update",
        "/start_weight_update",
        "/update_weights",
    ]
    assert stub.requested[-6][1] == {}  # no version


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # what vLLM calls deprecated as it is imported
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_parameters_are_sent_by_nccl_in_chunks_within_one_update(stub, monkeypatch):
    """vLLM's trainer side as far as it runs without a GPU: everything except the group and the broadcast."""
    from vllm.distributed.weight_transfer import nccl_engine

    groups, sent = [], []
    stub.answers["/get_world_size"] = 200, {"world_size": 2}
    monkeypatch.setattr("lightning_rlhf.extras.servers.push._CHUNK_BYTES", 24)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", groups.append)
    monkeypatch.setattr(
        nccl_engine.NCCLTrainerWeightTransferEngine,
        "_broadcast",
        lambda self, source, meta: sent.append([(name, tensor.tolist()) for name, tensor in source]),
    )
    push, servers = WeightPush(NCCLTransport()), [VLLMServer(stub.url, None, 10)]
    push(servers, [*PARAMETERS, ("c", torch.zeros(1).bfloat16())], "one")
    push(servers, PARAMETERS[:1], "two")
    assert sent == [
        [("w", [[0, 1, 2], [3, 4, 5]])],
        [("b", [1, 1]), ("c", [0])],
        [("w", [[0, 1, 2], [3, 4, 5]])],
    ]
    bodies = dict(stub.requested)
    assert (groups[0].world_size, groups[0].master_address, len(groups)) == (3, "127.0.0.1", 1)
    assert bodies["/init_weight_transfer_engine"]["init_info"]["rank_offset"] == 1
    updates = [body["update_info"] for path, body in stub.requested if path == "/update_weights"]
    assert updates[1] == {"names": ["b", "c"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2], [1]]}
    assert [path for path in stub.paths() if "finish" in path or "start" in path] == [
        "/start_weight_update",
        "/finish_weight_update",
    ] * 2
    assert stub.version == "two"


class SourceOf032(ABC):
    """The abstract methods of ``WeightSource`` in vLLM 0.32."""

    @abstractmethod
    def metadata(self): ...

    @abstractmethod
    def __iter__(self): ...

    def read(self):
        return self.metadata(), list(self)


class SourceOf033(ABC):
    """The abstract methods of ``WeightSource`` in vLLM 0.33, where ``metadata`` must be a cached property."""

    def __init_subclass__(cls):
        if not isinstance(cls.__dict__["metadata"], functools.cached_property):
            raise TypeError("metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self): ...

    def iter_full(self):
        raise NotImplementedError

    def read(self):
        return self.metadata, list(self.iter_full())


@pytest.mark.parametrize("source", [SourceOf032, SourceOf033])
def test_chunk_is_a_weight_source_of_each_supported_vllm(source, monkeypatch):
    base = types.SimpleNamespace(ParamMeta=lambda *fields: fields, WeightSource=source)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    for pairs in (PARAMETERS, []):
        metadata, tensors = _chunk_source(pairs).read()
        assert metadata == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]
        assert tensors == pairs


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # what vLLM calls deprecated as it is imported
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_server_extension_is_registered_once_reads_only_memory_and_requires_a_configured_key(monkeypatch):
    import importlib

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from lightning_rlhf.extras.servers import plugin

    assert issubclass(WeightTransferEngineFactory._registry["shared_memory"](), plugin.SharedMemoryTransfer)
    importlib.reload(plugin)  # vLLM would raise if the name were taken twice
    for path in ("/etc/passwd", "/proc/1/fd/../../../etc/passwd", "/proc/self/mem"):
        with pytest.raises(ValueError, match="the path of the weights must be"):
            plugin.SharedMemoryUpdate(path, 1, [])
    assert plugin.SharedMemoryUpdate("/proc/12/fd/3", 1, []).nbytes == 1
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="needs a key in the environment variable VLLM_API_KEY"):
        plugin.GuardedRoutes(None)
