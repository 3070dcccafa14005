"""A run that is killed and resumed at any points gives bitwise the results of the uninterrupted run."""

import random
import subprocess
import sys

import pytest
import yaml

from tests.faults import runs
from tests.faults.runs import CONVERSATIONS, KILLED, ROOT, assert_same, checkpoint, output, ppo, rows, supervised

_WEIGHTS = "lightning_rlhf.rollout.weights:EngineWeights."
_SOURCE = "lightning_rlhf.rollout.source:RolloutSource."
_VALIDATION = "lightning_rlhf.callbacks.loop.rollout_validation:RolloutValidation."
_SAVE = "lightning_rlhf.callbacks.survival.checkpoint:RunCheckpoint."
_MANIFEST = "lightning_rlhf.strategies.checkpoints.manifest:"
_EXPORT = "lightning_rlhf.extras.export.hf_export:HFExport."

# In the order in which one run can meet them all; the numbers count calls since the run was last resumed.
DEATHS = {
    "before the first checkpoint": (_WEIGHTS + "check", 1, "before"),
    "in the validation before training": (_VALIDATION + "on_validation_batch_end", 1, "after"),
    "while the first checkpoint is written": ("torch:save", 1, "half"),
    "in the middle of an update": ("lightning_rlhf.modules.role_module:RoleModule.update", 10, "before"),
    "between checkpoint and validation": (_VALIDATION + "on_validation_start", 1, "before"),
    "in the validation that was due": (_VALIDATION + "on_validation_batch_end", 1, "after"),
    "while the best is written": (_SAVE + "on_validation_end", 2, "before"),
    "between generation and learning": (_WEIGHTS + "check", 2, "before"),
    "after an epoch's last batch": (_SAVE + "on_train_batch_end", 2, "after"),
    "between the weights of two models": ("safetensors.torch:save", 2, "before"),
    "while files are summed": (_MANIFEST + "digest", 2, "before"),
    "with a version that no manifest names": (_MANIFEST + "write", 1, "before"),
    "with a manifest not yet renamed": (_MANIFEST + "_put", 1, "before"),
    "with the new manifest and both versions": (_MANIFEST + "_put", 1, "after"),
    "while leftovers are removed": ("shutil:rmtree", 1, "before"),
    "before the new version is begun": (_MANIFEST + "begin", 2, "before"),
    "in the middle of generation": (_SOURCE + "request", 3, "after"),
    "after the last batch": (_SAVE + "on_train_batch_end", 6, "after"),
    "in the last validation": (_VALIDATION + "on_validation_batch_end", 1, "before"),
    "before the export": (_EXPORT + "_write", 1, "before"),
    "after the export": (_EXPORT + "_write", 1, "after"),
}
_BY_EPOCHS = {"max_epochs": 2, "val_check_interval": 1.0}


@pytest.mark.slow
def test_uninterrupted_run_changes_everything_that_is_compared(undisturbed):
    table = [dict(row) for row in rows(undisturbed(ppo(), calls=0))]
    training = [row for row in table if row["kl/coef"]]
    assert [row["step"] for row in training] == [str(step) for step in range(1, 13)]
    assert [row["step"] for row in table if row["val/digits_sampled"]] == ["0", "3", "6", "9", "12"]
    for name in ("kl/coef", "lr/actor", "lr/critic", "reward/mean", "loss/value", "loss/policy", "kl/ref"):
        assert len({row[name] for row in training}) > 9, name
    assert checkpoint(undisturbed(ppo()), "best")["global_step"] > 0


@pytest.mark.slow
def test_two_uninterrupted_runs_are_bitwise_equal(forge, undisturbed, tmp_path):
    assert forge.attempt(tmp_path, ppo()) == 0
    assert_same(tmp_path, undisturbed(ppo(), calls=0))


def killed_at_random_points(forge, reference, directory, config, kills, seed):
    """Kill a run at randomly chosen calls and resume and compare it until the number of kills is reached."""
    calls, draw, run = int((reference / "calls").read_text()), random.Random(seed), 0
    while kills > 0:
        run += 1
        deaths = [{"calls": draw.randrange(calls)} for _ in range(min(kills, 5))]
        kills -= forge.finish(directory / str(run), config, deaths)
        assert_same(directory / str(run), reference)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # counting all calls of the undisturbed run takes minutes on a busy machine
@pytest.mark.parametrize("kills", [2, 10])
def test_kills_at_random_points_change_no_result(forge, undisturbed, tmp_path, kills):
    killed_at_random_points(forge, undisturbed(ppo(), calls=0), tmp_path, ppo(), kills, seed=kills)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_kills_of_an_asynchronous_run_change_no_result(forge, undisturbed, tmp_path, max_staleness):
    config = ppo(3, max_staleness=max_staleness)
    names = ("while the first checkpoint is written", "in the validation that was due", "in the middle of an update",
             "in the middle of generation")  # fmt: skip
    assert forge.finish(tmp_path, config, [{"position": DEATHS[name]} for name in names]) == 4
    assert_same(tmp_path, undisturbed(config, calls=0))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_kills_at_random_points_of_an_asynchronous_run_change_no_result(forge, undisturbed, tmp_path, max_staleness):
    config = ppo(3, max_staleness=max_staleness)
    killed_at_random_points(forge, undisturbed(config, calls=0), tmp_path, config, 10, seed=max_staleness)


@pytest.mark.slow
def test_kill_in_the_middle_of_an_update_changes_no_result(forge, undisturbed, tmp_path):
    config = ppo(max_steps=6)
    assert forge.finish(tmp_path, config, [{"position": DEATHS["in the middle of an update"]}]) == 1
    assert_same(tmp_path, undisturbed(config, calls=0))


@pytest.mark.slow
def test_kills_at_four_points_of_one_run_change_no_result(forge, undisturbed, tmp_path):
    names = ("while the first checkpoint is written", "in the validation that was due", "in the middle of an update",
             "after an epoch's last batch")  # fmt: skip
    assert forge.finish(tmp_path, ppo(), [{"position": DEATHS[name]} for name in names]) == 4
    assert_same(tmp_path, undisturbed(ppo(), calls=0))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_kills_at_every_kind_of_point_of_one_run_change_no_result(forge, undisturbed, tmp_path, every):
    deaths = [{"position": position} for position in DEATHS.values()]
    assert forge.finish(tmp_path, ppo(every), deaths) == len(deaths)
    assert_same(tmp_path, undisturbed(ppo(every), calls=0))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, _BY_EPOCHS], ids=["by steps", "by epochs"])
@pytest.mark.parametrize("death", list(DEATHS))
def test_single_kill_changes_no_result(forge, undisturbed, tmp_path, death, trainer):
    assert forge.finish(tmp_path, ppo(1, **trainer), [{"position": DEATHS[death]}]) == 1
    assert_same(tmp_path, undisturbed(ppo(1, **trainer)))


@pytest.mark.slow
def test_run_killed_at_the_end_of_an_epoch_and_in_the_next_repeats_no_data(forge, undisturbed, tmp_path):
    config = ppo(1, **_BY_EPOCHS)
    position = _SAVE + "on_train_batch_end"  # called by two callbacks after each step
    deaths = [
        {"position": (position, 10, "after")},
        {"position": (position, 4, "after")},
        {"position": (_WEIGHTS + "check", 1, "before")},
    ]
    assert forge.finish(tmp_path, config, deaths) == 3
    assert_same(tmp_path, undisturbed(config))


@pytest.mark.slow
def test_run_that_ends_within_an_epoch_resumes_in_that_epoch(forge, undisturbed, tmp_path):
    def steps(count):
        return ppo(max_steps=count, val_check_interval=3, check_val_every_n_epoch=None)

    position = _VALIDATION + "on_validation_batch_end"  # of the validation after step 7, which no interval asked for
    assert forge.finish(tmp_path, steps(7), [{"position": (position, 8, "after")}]) == 1
    assert_same(tmp_path, undisturbed(steps(7)))
    # and with more steps it becomes the longer run; only the best can be the one of the validation after step 7
    assert forge.attempt(tmp_path, steps(12), resume="last") == 0
    (tmp_path / "run/rollouts/validation-000007.jsonl").unlink()  # the longer run does not validate after step 7
    assert_same(tmp_path, undisturbed(steps(12)), names=("last",))


@pytest.mark.slow
def test_best_checkpoint_can_be_resumed(forge, undisturbed, tmp_path):
    config = ppo(background=False)
    assert forge.attempt(tmp_path, config, position=(_WEIGHTS + "check", 9, "before")) == KILLED
    assert checkpoint(tmp_path, "best")["global_step"] < checkpoint(tmp_path, "last")["global_step"]
    assert forge.attempt(tmp_path, config, resume="run/checkpoints/best.ckpt") == 0
    assert_same(tmp_path, undisturbed(ppo(), calls=0))


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(forge, undisturbed, tmp_path):
    assert forge.finish(tmp_path, ppo(), []) == 0
    assert forge.attempt(tmp_path, ppo(), resume="last") == 0
    assert_same(tmp_path, undisturbed(ppo(), calls=0))


@pytest.mark.slow
def test_resuming_without_a_checkpoint_starts_a_new_run_with_one_line(forge, tmp_path):
    config = ppo(max_steps=1)
    assert forge.attempt(tmp_path, config, resume="last") == 0
    text = output(tmp_path).splitlines()
    assert text[0] == "run/checkpoints has no last.ckpt yet: training starts from the beginning."
    assert not [line for line in text if "warn" in line.lower()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_supervised_runs_resume_exactly_within_an_epoch_and_after_the_last_step(forge, undisturbed, tmp_path, kind):
    position = _SAVE + "on_train_batch_end"
    deaths = [
        {"position": (position, 3, "after")},
        {"position": (position, 8, "after")},
        {"position": (_EXPORT + "_write", 1, "before")},
    ]
    assert forge.finish(tmp_path, supervised(kind), deaths) == 3
    assert_same(tmp_path, undisturbed(supervised(kind)))


@pytest.mark.slow
def test_processes_of_the_command_killed_at_random_times_change_no_result(undisturbed, tmp_path):
    config, draw, resume = ppo(1), random.Random(1), []
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "config.yaml"]
    environment = {**runs.os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for kill in [*range(6), None]:
        process = subprocess.Popen([*command, *resume], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        resume = ["--ckpt_path", "last"]
        if kill is None:
            assert process.wait() == 0
            break
        try:
            process.wait(draw.uniform(6, 16))  # any moment will do, before the start and after the end included
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert_same(tmp_path, undisturbed(config))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_ten_kills_of_a_run_on_vllm_change_no_result(forge, undisturbed, tmp_path, max_staleness):
    config = ppo(1, engine="VLLMEngine", max_staleness=max_staleness)
    killed_at_random_points(forge, undisturbed(config, calls=0), tmp_path, config, kills=10, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_kills_in_conversations_change_no_result(forge, undisturbed, tmp_path, max_staleness):
    config = ppo(1, environment=CONVERSATIONS, max_staleness=max_staleness)
    table = [dict(row) for row in rows(undisturbed(config, calls=0))]
    training = [row for row in table if row["kl/coef"]]
    assert len({row["env/turns"] for row in training}) > 1
    assert all(0 < float(row["env/written_fraction"]) < 1 for row in training)
    position = "lightning_rlhf.rollout.conversation_loop:ConversationLoop._on_reply"
    deaths = [{"position": (position, call, when)} for call, when in ((75, "before"), (120, "after"), (60, "before"))]
    assert forge.finish(tmp_path, config, deaths) == 3
    assert_same(tmp_path, undisturbed(config, calls=0))
