"""Two ranks and vLLM: an engine per rank, a shared engine, a shared engine of two workers, and a server."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from lightning_rlhf import Pretrained
from lightning_rlhf.extras.images.processor import load_processor
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.distributed.launch import ROOT, free_port, run_ranks
from tests.helpers import assert_close
from tests.rollout.engines import pushed, setup_of, source_of
from tests.rollout.test_image_rollouts import SAMPLING, assert_echo, logprobs_of, prompts_of, started
from tests.rollout.test_vllm_conversations import converse, largest_gap_of_sampled, requests
from tests.vision_models import write_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]
DOCUMENT = (ROOT / "docs/rollouts.md").read_text()
KEY = "open sesame"


def ranks(function, *arguments):
    return run_ranks(f"tests.distributed.rollout_ranks:{function}", 2, *arguments, seconds=400)


def assert_right(rolled, version):
    assert rolled["gap"] < 1e-5
    assert rolled["greedy"]
    assert rolled["versions"] == [version]


def assert_equal_up_to_rounding(rolled, other):
    """Check equal tokens, and log-probs within 1e-6: with AVX-512, rounding depends on the batch."""
    assert {**rolled, "completions": None, "gap": None} == {**other, "completions": None, "gap": None}
    for (ids, logprobs, reason), (other_ids, other_logprobs, other_reason) in zip(
        rolled["completions"], other["completions"], strict=True
    ):
        assert (ids, reason) == (other_ids, other_reason)
        assert logprobs == pytest.approx(other_logprobs, rel=0, abs=1e-6)


def test_separate_and_shared_engines_sample_equal_tokens(tmp_path):
    first, second = ranks("own_and_shared", str(tmp_path))
    for result in (first, second):
        assert result["inherited"] == []  # nothing of the launcher's
        for number, version in enumerate((3, 4)):
            assert_right(result["single"][number], version)
            assert_equal_up_to_rounding(result["shared"][number], result["single"][number])
        assert result["killed"] == first["killed"]
        assert result["seconds"] < 10
        for message in result["killed"]:
            assert re.match(
                r"EngineDied: the engine process \d+ died: killed by signal 9 \(SIGKILL\), often because .*; its log",
                message,
            )
        assert result["single same"] == result["shared same"] == first["single same"]
    assert first["ready"][0] != second["ready"][0]  # two processes
    assert first["ready"][1] == second["ready"][1]  # one
    assert (tmp_path / "shared0/engine.log").exists()
    assert not (tmp_path / "shared1/engine.log").exists()


def test_engine_of_two_workers_serves_two_ranks(tmp_path):
    first, second = ranks("tensor_parallel", str(tmp_path))
    for result in (first, second):
        for version, rolled in enumerate(result["rolled"]):
            assert_right(rolled, version)
        assert result["difference"] is None
        assert result["killed"] == first["killed"]
        assert result["killed"].startswith("EngineDied: the engine process")
        assert result["seconds"] < 60
    assert first["workers"] >= 2
    assert first["left"] == 0
    assert first["ready"] == second["ready"]


def test_weights_pushed_within_gpus_equal_those_pushed_through_the_host(tmp_path):
    for result in ranks("within_gpus", str(tmp_path)):
        for version, (within, through_host) in enumerate(zip(result["gpus"], result["host"], strict=True)):
            assert_right(within, version)
            assert within == through_host
        assert result["push ranks"] == 1  # all read the weights
        assert set(result["sizes"]) == {30_000}
        assert "out of memory" in result["error"]
        for number, through_host in enumerate(result["through the host"]):
            assert_right(through_host, 5 + number)


@pytest.fixture
def server(tmp_path, monkeypatch, request):
    """Address and process of the documented server command, on another port and with a guard.

    The parameter is ``images`` for a server that reads them, or further options.
    """
    options = getattr(request, "param", "")
    reads_images = options == "images"
    command = next(block for block in re.findall(r"```bash\n(.*?)```", DOCUMENT, re.DOTALL) if "shared_memory" in block)
    folder, port = tmp_path / "model", free_port()
    changes = [("MODEL", folder), ("8000", port), (".venv/bin/python", sys.executable)]
    if reads_images:
        write_checkpoint("idefics3", folder)
        (change,) = re.findall(r"replace `(--[a-z-]+)` by\s+`(--[a-z-]+)`", DOCUMENT)
        changes.append(change)
    else:
        setup_of(source_of(max_position_embeddings=512), folder)
    for before, after in changes:
        assert before in command
        command = command.replace(before, str(after))
    command = f"{command.strip()} --middleware lightning_rlhf.extras.servers.plugin.GuardedRoutes"
    if options.startswith("--"):
        command += f" {options}"
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "server.log").open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    yield f"http://127.0.0.1:{port}", process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("server", ["", "--data-parallel-size 2"], indirect=True)
def test_documented_server_serves_two_ranks(server, tmp_path):
    url, process = server
    first, second = ranks("one_server", str(tmp_path), url, process.pid)
    for result in (first, second):
        for number, version in enumerate((3, 4)):
            assert_right(result["rolled"][number], version)
        assert_right(result["again"], 8)
        assert result["long"] == [True, True]
        assert result["echo"] < 1e-5
        assert result["exhausted"]
        assert "serves another model" in result["unlike"]["model"]
        assert "its num_hidden_layers is 2, but the actor's is 1" in result["unlike"]["model"]
        assert result["unlike"]["length"].endswith("start it with --max-model-len 9999, not 512")
        assert result["unlike"]["dtype"].endswith("start it with --dtype bfloat16, not torch.float32")
        assert re.match("RunError: .* rejected the request: .*600.*512", result["too long"])
        assert result["stale"] == "nothing"
        assert result["left out"] <= 1
        assert re.match("RunError: the model changed .* expected .* got ", result["changed"])
        assert re.match(r"RunError: the push of the weights 'run \w+, version 9' .* has failed", result["after"])
        for message in result["killed"]:
            assert re.match(f"EngineDied: the vLLM server at {url} cannot be reached", message)
    assert first["left out"] == 1
    assert first["rolled"][0]["completions"] != second["rolled"][0]["completions"]  # each has its own prompts
    for key in ("ready", "unlike", "changed"):
        assert first[key] == second[key]
    assert first["ready"].startswith("vLLM ")


def test_conversations_with_the_documented_server_are_correct_in_any_order(server, tmp_path):
    url, _ = server
    engine = VLLMServerEngine(url, timeout=120)
    engine.start(setup_of(source_of(), tmp_path / "actor"))
    try:
        engine.wait()
        requested = requests(16)
        for version in (5, 6):
            actor = pushed(engine, source_of(seed=version), version)
            expected = converse(engine, requested, version)
            reverse = converse(engine, requested[::-1], version)[::-1]
            for entry, other in zip(reverse, expected, strict=True):
                assert (entry.token_ids, entry.logprobs, entry.sampled) == (
                    other.token_ids,
                    other.logprobs,
                    other.sampled,
                )
            assert max(len(item.conversation.turn_ends) for item in expected) > 1
            assert any(False in item.sampled for item in expected)
            assert largest_gap_of_sampled(actor, requested, expected) < 1e-5
    finally:
        engine.close()


@pytest.mark.parametrize("server", ["images"], indirect=True)
def test_responses_to_images_of_the_documented_server_are_correct(server, tmp_path):
    url, _ = server
    source = Pretrained(str(tmp_path / "model"), train_vision=True)
    processor, role = load_processor(source.path), source.causal()
    engine = VLLMServerEngine(url, timeout=120)
    started(engine, tmp_path, processor, source)
    sent = []
    connected = engine._running.members[0].server
    post = connected.post

    def spy(path, body=None, *arguments, **query):
        sent.extend(part["url"] is not None for part in (body or {}).get("content_parts", ()))
        return post(path, body, *arguments, **query)

    connected.post = spy
    try:
        prompts, images = prompts_of(processor, 40)
        for version, sends_files in ((1, True), (2, False)):
            engine.update_weights(whole_tensors(role.lm), version)
            sent.clear()
            completions = generate(engine, prompts, SAMPLING, range(40))
            sets = {frozenset(image.sha256 for image in each.images) for each in images if each.images}
            assert sum(sent) <= sends_files * sum(map(len, sets))  # each once, not for each response
            assert any(sent) == sends_files
            expected = logprobs_of(role, processor, prompts, images, completions)
            for completion, logprobs in zip(completions, expected, strict=True):
                assert_close(torch.tensor(completion.logprobs), logprobs, atol=1e-4)
            with torch.no_grad():
                for weights in role.parameters():
                    weights += 0.02 * torch.randn_like(weights)
        engine.update_weights(whole_tensors(role.lm), 3)
        before = generate(engine, prompts, SAMPLING, range(40))
        post("/reset_mm_cache")  # as if the server had dropped the images
        sent.clear()
        after = generate(engine, prompts, SAMPLING, range(40))
        assert any(sent)
        assert [each.token_ids for each in after] == [each.token_ids for each in before]
        assert_echo(engine, processor, role, prompts[:6], images[:6], atol=1e-4)
    finally:
        engine.close()


def test_documented_configurations_are_engines():
    parser = ArgumentParser()
    parser.add_argument("--engine", type=RolloutEngine)
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)]
    engines = [parser.instantiate(parser.parse_object(block)).engine for block in blocks if "engine" in block]
    assert [type(engine) for engine in engines] == [SharedEngine, VLLMServerEngine, VLLMServerEngine]
    assert engines[0]._engine._tensor_parallel_size == engines[0].traits.ranks == 2
    assert engines[1].traits.ranks == 1
