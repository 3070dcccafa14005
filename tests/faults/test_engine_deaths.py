"""The engine of a run is killed or stopped at random times: the run has the same bits as an undisturbed one."""

import signal

import pytest

from tests.faults.runs import CONVERSATIONS, assert_same, output, ppo

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1500)]


def disturbed(config, forge, directory, **killer):
    """Run with an engine that dies, and return the number of its deaths."""
    trainer = config["trainer"]
    killing = {"class_path": "tests.faults.runs.KillsEngine", "init_args": killer}
    config = {**config, "trainer": {**trainer, "callbacks": [*trainer["callbacks"], killing]}}
    assert forge.attempt(directory, config) == 0, output(directory)[-4000:]
    deaths = int((directory / "killed").read_text())
    assert output(directory).count("It is started again, with the same weights and requests") == deaths
    return deaths


def config_of(max_staleness, environment, **engine):
    config = ppo(1, engine="VLLMEngine", max_staleness=max_staleness, environment=environment)
    config["trainer"]["callbacks"][0]["init_args"]["engine"]["init_args"] = {"max_restarts": 99, **engine}
    return config


@pytest.mark.parametrize("environment", [None, CONVERSATIONS], ids=["prompts", "conversations"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_killed_engines_change_no_result(forge, undisturbed, tmp_path, max_staleness, environment):
    config = config_of(max_staleness, environment)
    assert disturbed(config, forge, tmp_path, seed=max_staleness, deaths=5, every=2.0) >= 4
    assert_same(tmp_path, undisturbed(config))


def test_stopped_engines_are_replaced(forge, undisturbed, tmp_path):
    config = config_of(1, None, silent_seconds=15.0)
    assert disturbed(config, forge, tmp_path, seed=1, deaths=2, number=int(signal.SIGSTOP), every=2.0) >= 1
    assert "it did nothing for 15 s (silent_seconds)" in output(tmp_path)
    assert_same(tmp_path, undisturbed(config))
