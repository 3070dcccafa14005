"""The vLLM servers of a run are killed or stopped at random times: the run has the same bits as an undisturbed one."""

import json
import signal
import threading

import pytest

from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.faults.runs import CONVERSATIONS, LLAMA, assert_same, output, ppo
from tests.faults.vllm_servers import VLLMServers, with_servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["one_server", "two_servers"])
def servers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    servers = VLLMServers(model, request.param, 128, folder)
    yield servers
    servers.close()


def disturbed(config, forge, directory, servers, **killer):
    """Run while servers are killed; return the number of kills."""
    before, ended = servers.deaths, threading.Event()
    killing = threading.Thread(target=servers.kill_at_random, args=(ended,), kwargs=killer)
    killing.start()
    try:
        assert forge.attempt(directory, config) == 0, output(directory)[-4000:]
    finally:
        ended.set()
        killing.join()
    return servers.deaths - before


@pytest.mark.parametrize("environment", [None, CONVERSATIONS], ids=["prompts", "conversations"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_killed_servers_change_no_result(forge, undisturbed, tmp_path, servers, max_staleness, environment):
    config = with_servers(ppo(1, max_staleness=max_staleness, environment=environment), servers.urls)
    reference = undisturbed(config)
    most = servers.deaths + 5
    assert disturbed(config, forge, tmp_path, servers, seed=max_staleness, every=2.0, most=most) >= 2
    assert "is left out until it works" in output(tmp_path)
    assert_same(tmp_path, reference)


def test_stopped_servers_are_left_out(forge, undisturbed, tmp_path, servers):
    config = with_servers(ppo(1), servers.urls, silent_seconds=5.0)
    reference = undisturbed(config)
    most = servers.deaths + 1
    timer = threading.Timer(20, servers.kill_all)  # as a cluster's scheduler does after a failed probe
    timer.start()
    try:
        assert disturbed(config, forge, tmp_path, servers, seed=3, every=1.0, number=signal.SIGSTOP, most=most) == 1
    finally:
        timer.cancel()
    assert "no response for 5 s" in output(tmp_path)
    assert_same(tmp_path, reference)
