"""The engine of a run is killed or stopped at random times: the run has the same bits as an undisturbed one."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
import yaml

from tests import figures
from tests.faults.runs import CONVERSATIONS, ROOT, assert_same, output, ppo, rows

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1500)]


def disturbed(config, forge, directory, **killer):
    """Run with an engine that dies, and return the number of its deaths."""
    assert forge.attempt(directory, with_killer(config, **killer)) == 0, output(directory)[-4000:]
    deaths = int((directory / "killed").read_text())
    figures.record("kills", deaths)
    assert output(directory).count("It is started again, with the same weights and requests") == deaths
    return deaths


def with_killer(config, **killer):
    trainer = config["trainer"]
    killing = {"class_path": "tests.faults.runs.KillsEngine", "init_args": killer}
    return {**config, "trainer": {**trainer, "callbacks": [*trainer["callbacks"], killing]}}


LONG = {"max_steps": 60, "val_check_interval": 30, "check_val_every_n_epoch": None}


def config_of(max_staleness, environment, trainer=None, **engine):
    config = ppo(5, engine="VLLMEngine", max_staleness=max_staleness, environment=environment, **(trainer or {}))
    config["trainer"]["callbacks"][0]["init_args"]["engine"]["init_args"] = {"max_restarts": 99, **engine}
    return config


@pytest.mark.parametrize(
    ("max_staleness", "environment"),
    [(0, None), (0, CONVERSATIONS), (1, None), (1, CONVERSATIONS), (2, CONVERSATIONS)],
    ids=["0-prompts", "0-conversations", "1-prompts", "1-conversations", "2-conversations"],
)
def test_engines_that_are_killed_20_times_change_no_result(forge, undisturbed, tmp_path, max_staleness, environment):
    config = config_of(max_staleness, environment, LONG)
    assert disturbed(config, forge, tmp_path, seed=max_staleness, deaths=20, every=1.0) == 20
    assert_same(tmp_path, undisturbed(config))


def test_engines_that_are_killed_20_times_at_max_staleness_2_lose_nothing(forge, undisturbed, tmp_path):
    """Responses that are generated again have the newer weights of a push in between, and are labelled so."""
    config = config_of(2, None, LONG)
    assert disturbed(config, forge, tmp_path, seed=2, deaths=20, every=1.0) == 20
    ours, theirs = ([dict(row) for row in rows(folder)] for folder in (tmp_path, undisturbed(config)))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    staleness, undisturbed_staleness = (
        [float(row["rollout/staleness_mean"]) for row in rows_ if row.get("rollout/staleness_mean")]
        for rows_ in (ours, theirs)
    )
    assert len(staleness) == len(undisturbed_staleness) == 60
    assert undisturbed_staleness[2:] == [2.0] * 58
    assert all(0 <= new <= old for new, old in zip(staleness, undisturbed_staleness, strict=True))
    assert sum(new == old for new, old in zip(staleness, undisturbed_staleness, strict=True)) >= 30


def test_killed_engines_with_adapters_change_no_result(forge, undisturbed, tmp_path):
    config = config_of(1, None)
    config["trainer"]["callbacks"][0]["init_args"]["engine"]["class_path"] = (
        "lightning_rlhf.rollout.vllm.engine.VLLMAdapterEngine"
    )
    actor = config["model"]["init_args"]["actor"]
    lora = {"rank": 2, "alpha": 4}
    config["model"]["init_args"]["actor"] = {**actor, "init_args": {**actor["init_args"], "lora": lora}}
    assert disturbed(config, forge, tmp_path, seed=1, deaths=4, every=2.0) >= 2
    assert_same(tmp_path, undisturbed(config))


def test_stopped_engines_are_replaced(forge, undisturbed, tmp_path):
    config = config_of(1, None, silent_seconds=15.0)
    assert disturbed(config, forge, tmp_path, seed=1, deaths=2, number=int(signal.SIGSTOP), every=2.0) >= 1
    assert "it did nothing for 15 s (silent_seconds)" in output(tmp_path)
    assert_same(tmp_path, undisturbed(config))


@pytest.mark.parametrize(
    ("max_staleness", "environment"), [(0, CONVERSATIONS), (1, None)], ids=["0-conversations", "1-prompts"]
)
def test_nonsense_slow_and_missing_messages_change_no_result(forge, undisturbed, tmp_path, max_staleness, environment):
    config = config_of(max_staleness, environment, LONG, silent_seconds=8.0)
    faulty = {"class_path": "tests.faults.runs.MakesWorkersFaulty", "init_args": {"most": 20}}
    trainer = {**config["trainer"], "callbacks": [faulty, *config["trainer"]["callbacks"]]}
    assert forge.attempt(tmp_path, {**config, "trainer": trainer}) == 0, output(tmp_path)[-4000:]
    faults = Counter((tmp_path / "faults").read_text().split())
    assert faults == {"nonsense": 12, "slow": 4, "hang": 4}
    shown = output(tmp_path)
    assert shown.count("it sent an invalid message") == faults["nonsense"]
    assert shown.count("it did nothing for 8 s (silent_seconds)") == faults["hang"]
    assert_same(tmp_path, undisturbed(config))


def run_two_ranks(config, directory):
    """Run the command with two processes, and return its output."""
    directory.mkdir()
    config = {**config, "trainer": {**config["trainer"], "devices": 2, "strategy": "rlhf_ddp"}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "config.yaml"]
    done = subprocess.run(line, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_a_killed_engine_that_two_ranks_share_changes_no_result(tmp_path):
    config = config_of(1, None)
    loop = config["trainer"]["callbacks"][0]["init_args"]
    loop["engine"] = {
        "class_path": "lightning_rlhf.rollout.shared.SharedEngine",
        "init_args": {"ranks": 2, "engine": loop["engine"]},
    }
    run_two_ranks(config, tmp_path / "undisturbed")
    shown = run_two_ranks(with_killer(config, seed=2, deaths=3, every=2.0), tmp_path / "disturbed")
    assert shown.count("It is started again, with the same weights and requests") >= 2
    assert rows(tmp_path / "disturbed") == rows(tmp_path / "undisturbed")


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_killed_engines_of_two_ranks_change_no_result(tmp_path, max_staleness):
    config = config_of(max_staleness, None, LONG)
    run_two_ranks(config, tmp_path / "undisturbed")
    shown = run_two_ranks(with_killer(config, seed=max_staleness, deaths=10, every=1.0), tmp_path / "disturbed")
    deaths = sum(map(int, (tmp_path / "disturbed/killed").read_text().split()))
    assert shown.count("It is started again, with the same weights and requests") == deaths == 20
    assert rows(tmp_path / "disturbed") == rows(tmp_path / "undisturbed")
    last = [float(dict(row)["step"]) for row in rows(tmp_path / "disturbed")][-1]
    assert last >= 59
