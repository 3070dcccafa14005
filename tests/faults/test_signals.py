"""A signal ends a run in time with a checkpoint, the right exit code and the command to resume."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from lightning.pytorch import Callback

from lightning_rlhf.extras.report.run_directory import end_state
from tests.faults.runs import ROOT, assert_same, callback, checkpoint, output, ppo

TERM, CTRL_C = int(signal.SIGTERM), int(signal.SIGINT)
_WEIGHTS = "lightning_rlhf.rollout.weights:EngineWeights."
_SOURCE = "lightning_rlhf.rollout.source:RolloutSource."
_VALIDATION = "lightning_rlhf.callbacks.loop.rollout_validation:RolloutValidation."
_UPDATE = "lightning_rlhf.modules.role_module:RoleModule.update"  # eight of them in a step

# A place in the code, how often it was called before the signal comes, and the step whose state is saved then.
PLACES = {
    "while responses are generated": (_WEIGHTS + "check", 4, 3),
    "in the middle of an update": (_UPDATE, 8 * 3 + 2, 4),
    "in a validation": (_VALIDATION + "on_validation_batch_end", 3, 3),
}


def last_line(directory):
    return output(directory).strip().splitlines()[-1]


def goes_on(step):
    return f"to resume from step {step}, add --ckpt_path last to the same command (run/checkpoints/last.ckpt)"


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_sigterm_during_asynchronous_generation_leads_to_the_uninterrupted_result(
    forge, undisturbed, tmp_path, max_staleness
):
    config = ppo(every=5, max_staleness=max_staleness)
    assert forge.attempt(tmp_path, config, position=(_SOURCE + "collect", 4, [TERM])) == 143
    assert checkpoint(tmp_path)["global_step"] == 3
    assert len(checkpoint(tmp_path)["lightning_rlhf_requests"]) == max_staleness
    assert forge.attempt(tmp_path, config, resume="last") == 0
    assert_same(tmp_path, undisturbed(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "location", [next(iter(PLACES)), *(pytest.param(position, marks=pytest.mark.slow) for position in list(PLACES)[1:])]
)
def test_sigterm_at_any_point_leaves_a_checkpoint_that_leads_to_the_uninterrupted_result(
    forge, undisturbed, tmp_path, location
):
    where, count, step = PLACES[location]
    config = ppo(every=5)
    assert forge.attempt(tmp_path, config, position=(where, count, [TERM])) == 143
    assert last_line(tmp_path) == f"lightning-rlhf: ended by SIGTERM after step {step}; {goes_on(step)}"
    assert "Traceback" not in output(tmp_path)
    assert checkpoint(tmp_path)["global_step"] == step
    assert forge.attempt(tmp_path, config, resume="last") == 0
    assert_same(tmp_path, undisturbed(config))


@pytest.mark.slow
def test_ctrl_c_ends_like_sigterm_with_a_different_exit_code(forge, tmp_path):
    where, count, step = PLACES["in the middle of an update"]
    assert forge.attempt(tmp_path, ppo(every=5), position=(where, count, [CTRL_C])) == 130
    assert "Ctrl-C: the run ends after step 4; another Ctrl-C ends it immediately" in output(tmp_path)
    assert last_line(tmp_path) == f"lightning-rlhf: ended by Ctrl-C after step {step}; {goes_on(step)}"
    assert checkpoint(tmp_path)["global_step"] == step


@pytest.mark.slow
def test_signal_during_a_checkpoint_write_lets_it_finish(forge, tmp_path):
    position = (
        "lightning_rlhf.strategies.checkpoints.manifest:publish",
        2,
        [TERM],
    )  # of the best, then of the last at step 5
    assert forge.attempt(tmp_path, ppo(every=5), position=position) == 143
    assert checkpoint(tmp_path)["global_step"] in (5, 6)  # the writer is a thread, and training continues meanwhile


@pytest.mark.slow
def test_signal_before_the_first_step_ends_the_run_without_a_checkpoint(forge, tmp_path):
    assert forge.attempt(tmp_path, ppo(), position=(_VALIDATION + "on_train_start", 1, [TERM])) == 143
    assert last_line(tmp_path) == "lightning-rlhf: ended by SIGTERM before the first step"
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
def test_process_that_hangs_within_a_step_ends_after_the_grace_period(forge, tmp_path):
    config = ppo()
    config["trainer"]["callbacks"].append(callback("GracefulShutdown", grace_seconds=3.0))
    began = time.monotonic()
    assert forge.attempt(tmp_path, config, position=(_UPDATE, 8 * 2 + 1, [TERM, "hang"])) == 143
    assert time.monotonic() - began < 60
    assert f"lightning-rlhf: ended 3 s after SIGTERM, during an unfinished step; {goes_on(2)}" in output(tmp_path)
    assert end_state(tmp_path / "run")["state"] == "interrupted"
    assert "during an unfinished step" in (tmp_path / "run/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(TERM, 143), pytest.param(CTRL_C, 130, marks=pytest.mark.slow)])
def test_second_signal_ends_the_process_immediately(forge, tmp_path, number, code):
    assert forge.attempt(tmp_path, ppo(), position=(_UPDATE, 3, [number, "pause", number, "hang"])) == code
    assert "second signal" in last_line(tmp_path)
    assert last_line(tmp_path).endswith("the process ends immediately")


@pytest.mark.slow
def test_repeated_simultaneous_signals_count_once(forge, tmp_path):
    assert forge.attempt(tmp_path, ppo(every=5), position=(_UPDATE, 3, [TERM, TERM, TERM])) == 143
    assert last_line(tmp_path) == f"lightning-rlhf: ended by SIGTERM after step 1; {goes_on(1)}"


@pytest.mark.slow
def test_failure_between_two_steps_leaves_a_checkpoint_of_the_last_one(forge, tmp_path):
    assert forge.attempt(tmp_path, ppo(every=5), position=(_WEIGHTS + "check", 4, "fail")) not in (0, 143)
    assert f"lightning-rlhf: failed after step 3; {goes_on(3)}" in output(tmp_path)
    assert checkpoint(tmp_path)["global_step"] == 3


@pytest.mark.slow
def test_failure_within_an_update_keeps_the_previous_checkpoint(forge, tmp_path):
    assert forge.attempt(tmp_path, ppo(every=2), position=(_UPDATE, 8 * 3 + 2, "fail")) not in (0, 143)
    assert f"lightning-rlhf: failed after step 3; {goes_on(2)}" in output(tmp_path)
    assert checkpoint(tmp_path)["global_step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_full_disk_gives_a_one_line_error_and_the_run_resumes_exactly_later(forge, undisturbed, tmp_path, background):
    config = ppo(every=2, background=background)
    position = (
        "lightning_rlhf.strategies.checkpoints.manifest:write",
        3,
        "full",
    )  # 1: last at 2; 2: best at 3; 3: last at 4
    assert forge.attempt(tmp_path, config, position=position) == 1
    trouble = "lightning-rlhf: the disk of run is full (No space left on device): free space on it; stopped after step "
    assert last_line(tmp_path).startswith(trouble)
    assert last_line(tmp_path).endswith(goes_on(2))
    assert "Traceback" not in output(tmp_path)
    assert forge.attempt(tmp_path, config, resume="last") == 0
    assert_same(tmp_path, undisturbed(config))


@pytest.mark.slow
def test_removed_run_directory_is_reported_and_the_last_step_is_saved(forge, tmp_path):
    config = ppo(max_steps=4)
    assert forge.attempt(tmp_path, config, position=(_WEIGHTS + "check", 2, "gone")) == 1
    assert " was removed while the run wrote to it: do not" in last_line(tmp_path)
    assert last_line(tmp_path).endswith(f"stopped after step 2; {goes_on(2)}")
    assert checkpoint(tmp_path)["global_step"] == 2


@pytest.mark.slow
def test_slurm_job_ends_before_its_time_limit(forge, tmp_path):
    config = ppo(every=5)
    config["trainer"]["callbacks"].append({"class_path": "tests.faults.test_signals.JobEndsSoon"})
    assert forge.attempt(tmp_path, config) == 143
    because = "because the job's time is nearly over after step 2"
    assert last_line(tmp_path) == f"lightning-rlhf: ended {because}; {goes_on(2)}"
    assert checkpoint(tmp_path)["global_step"] == 2


@pytest.mark.slow
def test_run_ended_by_max_time_keeps_its_last_step(forge, tmp_path):
    config = ppo(every=100, max_steps=100_000, max_time={"seconds": 4})
    assert forge.attempt(tmp_path, config) == 0
    steps = [line.split(":")[0] for line in output(tmp_path).splitlines() if "reward/mean" in line]
    assert f"step {checkpoint(tmp_path)['global_step']}" == steps[-1]


class JobEndsSoon(Callback):
    """Sets SLURM's variable for a job that ends in 20 seconds, from the second step on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 20)


@pytest.mark.slow
@pytest.mark.vllm
def test_sigterm_ends_a_run_with_an_unresponsive_engine_and_saves_a_checkpoint(tmp_path):
    config = ppo(every=100, engine="VLLMEngine", max_steps=100)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "config.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "output.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + 200
    while "step 3: reward" not in output(tmp_path):
        assert time.monotonic() < end, output(tmp_path)
        time.sleep(0.1)
    (worker,) = psutil.Process(process.pid).children()
    worker.suspend()
    time.sleep(3)
    process.terminate()
    began = time.monotonic()
    assert process.wait(60) == 143
    assert time.monotonic() - began < 25
    assert not worker.is_running()
    step = checkpoint(tmp_path)["global_step"]
    assert last_line(tmp_path) == f"lightning-rlhf: ended by SIGTERM after step {step}; {goes_on(step)}"
