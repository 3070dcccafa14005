"""All step counters count rollouts, here with eight optimizer steps of two optimizers per rollout."""

import pytest

from tests.faults.runs import KILLED, callback, checkpoint, output, ppo, rows


@pytest.mark.slow
def test_max_steps_counts_rollouts(undisturbed):
    directory = undisturbed(ppo(), calls=0)
    assert checkpoint(directory)["global_step"] == 12
    assert len(list((directory / "run/rollouts").glob("step-*"))) == 12


@pytest.mark.slow
def test_val_check_interval_counts_rollouts_across_epochs(undisturbed):
    table = [dict(row) for row in rows(undisturbed(ppo(), calls=0))]
    assert [row["step"] for row in table if row["val/digits_sampled"]] == ["0", "3", "6", "9", "12"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "saved"), [(2, 6), pytest.param(1, 7, marks=pytest.mark.slow), pytest.param(5, 5, marks=pytest.mark.slow)]
)
def test_every_n_steps_counts_rollouts(forge, tmp_path, every, saved):
    position = "lightning_rlhf.rollout.weights:EngineWeights.check"
    assert forge.attempt(tmp_path, ppo(every, background=False), position=(position, 8, "before")) == KILLED
    assert checkpoint(tmp_path)["global_step"] == saved


@pytest.mark.slow
def test_last_step_is_saved_even_if_no_interval_ends_there(forge, tmp_path):
    assert forge.attempt(tmp_path, ppo(5, max_steps=3)) == 0
    assert checkpoint(tmp_path)["global_step"] == 3


@pytest.mark.slow
def test_fast_dev_run_counts_rollouts_and_writes_nothing(forge, tmp_path):
    assert forge.attempt(tmp_path, ppo(), arguments=["--trainer.fast_dev_run", "2"]) == 0
    steps = [line.split(":")[0] for line in output(tmp_path).splitlines() if "reward/mean" in line]
    assert steps == ["step 1", "step 2"]
    assert not (tmp_path / "run/checkpoints").exists()
    assert not (tmp_path / "run/metrics.csv").exists()


@pytest.mark.slow
def test_logger_x_axis_counts_rollouts_from_one_even_after_a_resume(forge, tmp_path):
    config = ppo(background=False)  # the checkpoint of a step is whole when the next hook is called
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "log", "name": "", "version": "v"},
    }
    position = "lightning_rlhf.callbacks.loop.rollout_validation:RolloutValidation.on_validation_start"
    assert (
        forge.attempt(tmp_path, config, position=(position, 3, "before")) == KILLED
    )  # at step 6, which has a checkpoint
    (tmp_path / "log").rename(tmp_path / "log of the killed run")
    assert forge.attempt(tmp_path, config, resume="last") == 0
    first, *lines = (tmp_path / "log/v/metrics.csv").read_text().splitlines()
    step, name = (first.split(",").index(column) for column in ("step", "kl/coef"))
    steps = [(int(line.split(",")[step]), line.split(",")[name] != "") for line in lines]
    assert sorted(set(steps)) == sorted([(6, False), *((s, True) for s in range(7, 13)), (9, False), (12, False)])


@pytest.mark.slow
def test_two_checkpoints_with_the_same_name_are_rejected(forge, tmp_path):
    config = ppo(max_steps=1)
    config["trainer"]["callbacks"].append(callback("RunCheckpoint", every_n_steps=3))
    assert forge.attempt(tmp_path, config) in (1, 2)
    assert "two RunCheckpoint callbacks would write last.ckpt: keep one of them" in output(tmp_path)
