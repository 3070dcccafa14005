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


def started(folder, count):
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    return VLLMServers(model, count, 128, folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    servers = started(tmp_path_factory.mktemp("server"), 1)
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    servers = started(tmp_path_factory.mktemp("servers"), 2)
    yield servers
    servers.close()


def disturbed(config, forge, directory, servers, **killer):
    """Run while servers are killed; return the number of kills."""
    before, ended = servers.deaths, threading.Event()

    def kill():
        while not ended.wait(0.1):
            if (directory / "output.log").exists() and "step 1:" in output(directory):
                servers.kill_at_random(ended, **killer)
                return

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        assert forge.attempt(directory, config) == 0, output(directory)[-4000:]
    finally:
        ended.set()
        killing.join()
    return servers.deaths - before


def assert_same_with_kills(config, forge, undisturbed, directory, servers, deaths, **killer):
    reference = undisturbed(config)
    most = servers.deaths + deaths
    assert disturbed(config, forge, directory, servers, most=most, **killer) >= min(deaths, 2)
    assert "is left out until it works" in output(directory)
    assert_same(directory, reference)


@pytest.mark.parametrize(
    ("max_staleness", "environment"),
    [(0, None), (1, CONVERSATIONS), (2, None)],
    ids=["prompts", "conversations ahead", "two steps ahead"],
)
def test_a_killed_server_changes_no_result(forge, undisturbed, tmp_path, server, max_staleness, environment):
    config = with_servers(ppo(1, max_staleness=max_staleness, environment=environment), server.urls)
    assert_same_with_kills(config, forge, undisturbed, tmp_path, server, 3, seed=max_staleness, every=2.0)


@pytest.mark.parametrize("environment", [None, CONVERSATIONS], ids=["prompts", "conversations"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_killed_servers_change_no_result(forge, undisturbed, tmp_path, servers, max_staleness, environment):
    config = with_servers(ppo(1, max_staleness=max_staleness, environment=environment), servers.urls)
    assert_same_with_kills(config, forge, undisturbed, tmp_path, servers, 5, seed=max_staleness, every=1.0)


def test_a_stopped_server_is_left_out(forge, undisturbed, tmp_path, server):
    config = with_servers(ppo(1), server.urls, silent_seconds=5.0)
    reference = undisturbed(config)
    most = server.deaths + 1
    timer = threading.Timer(40, server.kill_all)  # as a cluster's scheduler does after a failed probe
    timer.start()
    try:
        assert disturbed(config, forge, tmp_path, server, seed=3, every=5.0, number=signal.SIGSTOP, most=most) == 1
    finally:
        timer.cancel()
    assert "no response for 5 s" in output(tmp_path)
    assert_same(tmp_path, reference)
