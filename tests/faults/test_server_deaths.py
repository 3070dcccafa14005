"""The vLLM servers of a run are killed or stopped at random times: the run has the same bits as an undisturbed one."""

import json
import re
import signal
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest

from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.faults.runs import CONVERSATIONS, LLAMA, assert_same, output, ppo
from tests.faults.test_engine_deaths import LONG
from tests.faults.vllm_servers import VLLMServers, with_servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]


def started(folder, count, faults=None):
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    return VLLMServers(model, count, 128, folder, faults)


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
    before = servers.deaths
    with during_steps(directory, partial(servers.kill_at_random, **killer)):
        assert forge.attempt(directory, config) == 0, output(directory)[-4000:]
    return servers.deaths - before


@contextmanager
def during_steps(directory, disturb):
    """Call a function in a thread after the first step, with an event of the end and a function that counts steps."""
    ended = threading.Event()

    def steps():
        shown = output(directory) if (directory / "output.log").exists() else ""
        return len(re.findall(r"^step [1-9]\d*: reward", shown, re.MULTILINE))

    def wait_and_disturb():
        while not ended.wait(0.1):
            if steps():
                disturb(ended, steps)
                return

    thread = threading.Thread(target=wait_and_disturb)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def assert_same_with_kills(config, forge, undisturbed, directory, servers, deaths, **killer):
    reference = undisturbed(config)
    most = servers.deaths + deaths
    assert disturbed(config, forge, directory, servers, most=most, **killer) == deaths
    assert "is left out until it works" in output(directory)
    assert_same(directory, reference)


@pytest.mark.parametrize(
    ("max_staleness", "environment", "deaths"),
    [(0, None, 20), (1, CONVERSATIONS, 3), (2, None, 3)],
    ids=["prompts", "conversations ahead", "two steps ahead"],
)
def test_a_killed_server_changes_no_result(forge, undisturbed, tmp_path, server, max_staleness, environment, deaths):
    config = with_servers(ppo(5, max_staleness=max_staleness, environment=environment, **LONG), server.urls)
    assert_same_with_kills(config, forge, undisturbed, tmp_path, server, deaths, seed=max_staleness, every=1.0)


@pytest.mark.parametrize(
    ("max_staleness", "environment", "deaths"),
    [(0, None, 5), (0, CONVERSATIONS, 5), (1, None, 5), (1, CONVERSATIONS, 20)],
    ids=["prompts", "conversations", "prompts ahead", "conversations ahead"],
)
def test_killed_servers_change_no_result(forge, undisturbed, tmp_path, servers, max_staleness, environment, deaths):
    config = with_servers(ppo(5, max_staleness=max_staleness, environment=environment, **LONG), servers.urls)
    assert_same_with_kills(config, forge, undisturbed, tmp_path, servers, deaths, seed=max_staleness, every=1.0)


@pytest.mark.parametrize(
    ("count", "max_staleness", "environment"),
    [(1, 0, None), (2, 1, CONVERSATIONS)],
    ids=["one server", "two servers, conversations ahead"],
)
def test_wrong_late_and_missing_responses_change_no_result(
    forge, undisturbed, tmp_path, count, max_staleness, environment
):
    folder = tmp_path / "servers"
    folder.mkdir()
    faults = folder / "faults"
    faults.write_text("0\n")
    faulty = started(folder, count, faults)
    try:
        run = ppo(5, max_staleness=max_staleness, environment=environment, **LONG)
        config = with_servers(run, faulty.urls, timeout=120.0, silent_seconds=10.0)
        reference = undisturbed(config)
        with during_steps(tmp_path, lambda ended, steps: faults.write_text("20\n")):
            assert forge.attempt(tmp_path, config) == 0, output(tmp_path)[-4000:]
    finally:
        faulty.close()
    _, *made = faults.read_text().split()
    assert Counter(made) == {"error": 4, "nonsense": 6, "tokens": 4, "slow": 4, "hang": 2}
    assert_same(tmp_path, reference)


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
