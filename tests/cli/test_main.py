"""Runs from the command line: written files, printed output, and exit codes."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import Namespace

from lightning_rlhf.cli import main
from lightning_rlhf.cli.earlier_run import check_reads_elsewhere
from lightning_rlhf.cli.main import SaveRunConfig
from lightning_rlhf.data.rows import text_of
from lightning_rlhf.expected_errors import ExpectedError
from tests import algorithm_tables

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))
CALLS = []


def faulty(completions):
    """Raise in the second call."""
    CALLS.append(len(completions))
    if len(CALLS) > 1:
        raise KeyError("the faulty one")
    return [0.0] * len(completions)


def short(completions):
    return [0.0]


@pytest.fixture
def judged_by(config):
    def judged_by(name):
        CALLS.clear()
        loop = config["trainer"]["callbacks"][0]["init_args"]
        loop["rewards"] = [{"function": f"tests.cli.test_main.{name}"}]
        return config

    sys.modules["tests.cli.test_main"] = sys.modules[__name__]
    return judged_by


def test_run_writes_its_files_without_warnings(fit, config):
    result = fit(config)
    assert "weights_only" not in result.out + result.err  # Lightning's remark at each save
    assert (result.code, result.err, result.warned) == (0, "", [])
    assert "warning" not in result.out.lower()
    left = {path.name for path in Path("runs/tiny").iterdir()}
    assert {"config.yaml", "metrics.csv", "export", "engine", "tensorboard"} <= left
    assert "Rollouts by TransformersEngine: chosen in the configuration." in result.out
    assert "step 2: " in result.out


@pytest.mark.slow
def test_moved_run_can_be_resumed_without_warnings(fit, config):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.RunCheckpoint")
    assert fit(config).code == 0
    Path("runs/tiny").rename("runs/moved")
    moved = fit(config, "--trainer.default_root_dir", "runs/moved", "--ckpt_path", "last", "--trainer.max_steps", "3")
    assert (moved.code, moved.err, moved.warned) == (0, "", [])
    assert "step 3:" in moved.out


@pytest.mark.slow
def test_resumed_run_prints_its_start_and_finished_run_is_reported(fit, config):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.RunCheckpoint")
    assert fit(config).code == 0
    finished = fit(config, "--ckpt_path", "last")
    assert (finished.code, finished.err) == (0, "")
    assert "Nothing to train: max_steps is 2, and the checkpoint is from step 2." in finished.out
    further = fit(config, "--ckpt_path", "last", "--trainer.max_steps", "3")
    message = (
        "Resuming from step 2 with the checkpoint's optimizer and scheduler settings. "
        "Learning rates: actor 1e-06, critic 1e-05."
    )
    assert message in further.out
    assert "replaces the configured" not in further.out
    assert "step 3:" in further.out


def optimizers(config, actor, schedule=None):
    options = config["model"]["init_args"]
    options["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": actor}
    if schedule is not None:
        path = f"torch.optim.lr_scheduler.{schedule.pop('name')}"
        options["lr_scheduler"] = {"class_path": path, "init_args": schedule}


@pytest.mark.slow
def test_resume_reports_settings_that_the_checkpoint_replaces(fit, config):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.RunCheckpoint")
    optimizers(config, {"lr": 3e-4, "betas": [0.9, 0.98]}, {"name": "LinearLR", "start_factor": 0.5, "total_iters": 4})
    assert fit(config).code == 0
    optimizers(config, {"lr": 1e-3, "betas": [0.9, 0.98]}, {"name": "LinearLR", "start_factor": 0.5, "total_iters": 8})
    result = fit(config, "--ckpt_path", "last", "--trainer.max_steps", "3")
    assert result.code == 0, result.err
    assert "Learning rates: actor 0.000225, critic 1e-05." in result.out  # 0.5 + 0.5 * 2 / 4 of 3e-4
    message = [line for line in result.out.splitlines() if "replaces the configured" in line]
    assert message == [
        "AdamW of the actor: lr 0.0003 of the checkpoint replaces the configured 0.001",
        "LinearLR of the actor: total_iters 4 of the checkpoint replaces the configured 8",
    ]
    assert "To change them, start a new run from an export, with new optimizers." in result.out
    with open("runs/tiny/metrics.csv") as file:
        last = list(csv.DictReader(file))[-1]
    assert (last["step"], float(last["lr/actor"])) == ("3", pytest.approx(2.25e-4))


@pytest.mark.slow
def test_resume_with_other_kinds_of_schedules_is_rejected(fit, config):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.RunCheckpoint")
    assert fit(config).code == 0
    optimizers(config, {"lr": 1e-6}, {"name": "ConstantLR", "factor": 0.5})
    result = fit(config, "--ckpt_path", "last", "--trainer.max_steps", "3")
    assert result.code == 2
    message = "the learning-rate schedules are of other kinds than in the checkpoint (0 there, 1 here)"
    assert message in result.err
    assert fit(config).code == 0
    optimizers(config, {"lr": 1e-6}, {"name": "LinearLR", "total_iters": 5})
    result = fit(config, "--ckpt_path", "last", "--trainer.max_steps", "3")
    assert (result.code, "(1 there, 1 here)" in result.err) == (2, True)


@pytest.mark.slow
def test_saved_configuration_reproduces_the_run(fit, cli, config):
    assert fit(config).code == 0
    first = Path("runs/tiny/export/model.safetensors").read_bytes()
    result = cli("fit", "--config", "runs/tiny/config.yaml", "--trainer.default_root_dir", "runs/again")
    assert result.code == 0, result.err
    assert Path("runs/again/export/model.safetensors").read_bytes() == first


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.minibatch_size": 3}, "minibatch_size 3 does not divide the 4 responses of a step"),
        ({"model.actor": "runs/none/export"}, "no model at 'runs/none/export'"),
        ({"data.train": "nowhere.jsonl"}, "no data at 'nowhere.jsonl'"),
        ({"data.tokenizer": "runs/none/export"}, "no tokenizer at 'runs/none/export'"),
        (
            {"data.tokenizer.init_args.characters": "0123456789+=: abc"},
            "the tokenizer has 21 tokens, the actor only 18",
        ),
    ],
)
def test_errors_before_training_give_one_line_and_code_2(fit, config, changes, message):
    for path, value in changes.items():
        section, *keys = path.split(".")
        section_options = config[section]["init_args"]
        for key in keys[:-1]:
            section_options = section_options[key]
        section_options[keys[-1]] = value
    result = fit(config)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"lightning-rlhf: {message}")


def test_ppo_without_rollouts_is_rejected_before_training(fit, config):
    config["trainer"]["callbacks"] = []
    result = fit(config)
    assert result.code == 2
    assert result.err.startswith("lightning-rlhf: PPOModule trains on rollouts, and no callback provides them: add")


def test_failing_reward_function_gives_code_1_with_its_traceback(fit, judged_by):
    result = fit(judged_by("faulty"))
    assert result.code == 1
    *traceback, last = result.err.splitlines()
    assert last.startswith("lightning-rlhf: reward function 'faulty' raised KeyError: 'the faulty one' (")
    assert traceback[-1] == "KeyError: 'the faulty one'"
    assert any("in faulty" in line for line in traceback)
    assert len(CALLS) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("dry_call", "code", "count"), [(True, 2, 2), (False, 1, 4)], ids=["tried before", "in the run"]
)
def test_reward_function_with_too_few_values_gives_a_one_line_error(fit, judged_by, dry_call, code, count):
    config = judged_by("short")
    config["trainer"]["callbacks"][0]["init_args"]["rewards"][0]["dry_call"] = dry_call
    result = fit(config)
    assert result.code == code
    expected = f"a list of {count} numbers: one per completion"
    message = f"lightning-rlhf: reward function 'short' returned 1 value, expected {expected}"
    assert result.err.startswith(message)


def test_engine_that_cannot_be_built_gives_a_one_line_error(fit, config, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.vllm_installed", lambda: False)
    engine = "lightning_rlhf.rollout.vllm.engine.VLLMEngine"
    config["trainer"]["callbacks"][0]["init_args"]["engine"] = {"class_path": engine}
    result = fit(config)
    assert result.code == 2
    assert result.err.startswith("lightning-rlhf: VLLMEngine needs vLLM, which is missing: run pip install")


def test_temperature_that_the_engine_rejects_is_reported_before_training(fit, config, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.vllm_installed", lambda: True)
    engine = "lightning_rlhf.rollout.vllm.engine.VLLMEngine"
    config["trainer"]["callbacks"][0]["init_args"] |= {"engine": {"class_path": engine}, "temperature": 2.5}
    result = fit(config)
    assert result.code == 2
    assert result.err == (
        "lightning-rlhf: vLLM samples at temperatures from 0.01 to 2.0, got 2.5: "
        "use one of these or TransformersEngine\n"
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["vllm.engine.VLLMEngine", "transformers.TransformersEngine"])
def test_responses_beyond_the_positions_of_the_model_are_rejected_before_an_engine_starts(
    fit, config, monkeypatch, engine
):
    def start(*args):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.vllm_installed", lambda: True)
    monkeypatch.setattr(f"lightning_rlhf.rollout.{engine}.start", start)
    loop = config["trainer"]["callbacks"][0]["init_args"]
    loop |= {"engine": {"class_path": f"lightning_rlhf.rollout.{engine}"}, "max_response_tokens": 100}
    result = fit(config)
    assert result.code == 2
    assert result.err == (
        "lightning-rlhf: the longest prompt has 8 tokens and a response up to 100 (max_response_tokens), 108 together, "
        "and the actor accepts at most 64 (max_position_embeddings): set max_response_tokens: 56 or less\n"
    )


@pytest.mark.slow
def test_prompt_limit_above_the_positions_of_the_model_is_accepted_for_short_prompts(fit, config):
    config["data"]["init_args"]["max_tokens"] = 1024
    assert fit(config).code == 0


def test_unknown_characters_are_reported_before_the_model_loads(fit, config, monkeypatch):
    config["data"]["init_args"]["tokenizer"]["init_args"]["characters"] = "0123456789+: "
    result = fit(config)
    assert result.code == 0
    message = "train data: the tokenizer does not know 12 parts of the texts in 12 of 12 rows: '=' 12"
    assert result.out.index(message) < result.out.index("Rollouts by ")


def test_dying_engine_gives_a_one_line_error_and_code_1(fit, config, monkeypatch):
    from lightning_rlhf.expected_errors import EngineDied
    from lightning_rlhf.rollout.transformers import TransformersEngine

    def die(*args):
        raise EngineDied("the engine process 7 died: killed by signal 9 (SIGKILL); its log is x")

    monkeypatch.setattr(TransformersEngine, "request", die)
    result = fit(config)
    assert result.code == 1
    assert result.err == "lightning-rlhf: the engine process 7 died: killed by signal 9 (SIGKILL); its log is x\n"


def test_unexpected_error_keeps_its_traceback(fit, config, monkeypatch):
    def fail(*args, **named):
        raise ZeroDivisionError("not ours")

    monkeypatch.setattr("torch.optim.AdamW.step", fail)
    with pytest.raises(ZeroDivisionError, match="not ours"):
        fit(config)


# -- an earlier run ----------------------------------------------------------------------------------------------------


def test_checkpoint_that_does_not_exist_changes_nothing_in_a_finished_run(fit, config):
    assert fit(config).code == 0
    before = {path: path.read_bytes() for path in Path("runs/tiny").rglob("*") if path.is_file()}
    for name, path in (("missing.ckpt", "missing.ckpt"), ("best", "runs/tiny/checkpoints/best.ckpt")):
        result = fit(config, "--ckpt_path", name)
        message = f"lightning-rlhf: no checkpoint at {path}; there is runs/tiny/checkpoints/last.ckpt\n"
        assert (result.code, result.err) == (2, message)
    assert {path: path.read_bytes() for path in Path("runs/tiny").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_earlier_run_is_renamed(fit, config):
    assert fit(config).code == 0
    mark = Path("runs/tiny/mine.txt")
    mark.write_text("mine")
    result = fit(config)
    message = result.out.index(
        "An earlier run of runs/tiny is now runs/tiny-1.\n"
        "runs/tiny has no export until this run has ended; the earlier one is in runs/"
    )
    assert message < result.out.index("step 1:")
    assert Path("runs/tiny-1/mine.txt").read_text() == "mine"
    assert not mark.exists()
    fit(config)
    assert Path("runs/tiny-2/config.yaml").is_file()
    assert Path("runs/tiny-1/mine.txt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError], ids=["interrupt", "error"])
def test_earlier_run_is_restored_if_the_new_one_never_starts(fit, config, monkeypatch, kind):
    assert fit(config).code == 0
    Path("runs/tiny/mine.txt").write_text("mine")
    refused = fit(config, "--model.init_args.minibatch_size", "3")
    assert refused.code == 2
    assert "earlier run" not in refused.out  # it has its name again
    assert Path("runs/tiny/mine.txt").read_text() == "mine"

    def fail(*args):
        raise kind("while the models load")

    monkeypatch.setattr("lightning_rlhf.models.loading.FromConfig.causal", fail)
    if kind is OSError:
        with pytest.raises(OSError, match="while the models load"):
            fit(config)
    else:
        assert fit(config).code == 130
    assert Path("runs/tiny/mine.txt").read_text() == "mine"
    assert not Path("runs/tiny-1").exists()


def test_earlier_run_is_not_restored_if_an_engine_log_is_in_the_directory(fit, config, monkeypatch):
    from lightning_rlhf.expected_errors import EngineDied
    from lightning_rlhf.rollout.transformers import TransformersEngine

    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.yaml").write_text("earlier: true")

    def die(*args):
        raise EngineDied("the engine process 7 died; its log is x")

    monkeypatch.setattr(TransformersEngine, "start", die)
    result = fit(config)
    assert (result.code, result.err) == (2, "lightning-rlhf: the engine process 7 died; its log is x\n")
    assert "An earlier run of runs/tiny is now runs/tiny-1." in result.out
    assert Path("runs/tiny-1/config.yaml").read_text() == "earlier: true"


@pytest.mark.slow
def test_earlier_run_is_restored_if_the_first_validation_fails(fit, config, monkeypatch):
    from lightning_rlhf.rollout.transformers import TransformersEngine

    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.yaml").write_text("earlier: true")

    def fail(*args):
        raise ZeroDivisionError("in the first validation")

    data = config["data"]["init_args"]
    data["val"] = {"class_path": "lightning_rlhf.tasks.addition.Problems", "init_args": {"num_rows": 4, "seed": 1}}
    monkeypatch.setattr(TransformersEngine, "request", fail)
    with pytest.raises(ZeroDivisionError):
        fit(config)
    assert Path("runs/tiny/config.yaml").read_text() == "earlier: true"
    assert not Path("runs/tiny-1").exists()


@pytest.mark.slow
def test_run_that_reads_the_directory_it_would_rename_is_rejected_without_moving_files(fit, config):
    assert fit(config).code == 0
    instance = config["model"]["init_args"]
    instance["actor"] = instance["critic"] = "runs/tiny/export"
    result = fit(config)
    assert result.code == 2
    assert result.err.startswith(
        "lightning-rlhf: this run reads 'runs/tiny/export', but the earlier run in 'runs/tiny' would be"
    )
    assert Path("runs/tiny/export/config.json").is_file()
    assert not Path("runs/tiny-1").exists()
    assert fit(config, "--trainer.default_root_dir", "runs/next").code == 0


def test_texts_too_long_for_a_path_are_not_paths(tmp_path):
    long = {"prompt": "x" * 300 + " and/or this"}
    config = Namespace(model=Namespace(), data=Namespace(init_args=Namespace(train=Namespace(items=[long]))))
    check_reads_elsewhere(config, tmp_path)


@pytest.mark.slow
def test_export_that_a_resumed_run_replaces_is_renamed_with_its_step(fit, config, judged_by):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.RunCheckpoint")
    assert fit(config).code == 0
    weights = Path("runs/tiny/export/model.safetensors").read_bytes()
    assert fit(config, "--ckpt_path", "last").code == 0  # nothing was left to do
    assert Path("runs/tiny/export/model.safetensors").read_bytes() == weights
    assert not Path("runs/tiny/export-2").exists()
    broken = fit(judged_by("faulty"), "--ckpt_path", "last", "--trainer.max_steps", "4")
    assert broken.code == 1
    assert not Path("runs/tiny/export").exists()
    assert Path("runs/tiny/export-2/model.safetensors").read_bytes() == weights
    assert "runs/tiny/export is from step 2; it was renamed to runs/tiny/export-2." in broken.out


@pytest.mark.slow
def test_earlier_run_stays_renamed_if_the_new_one_fails_during_training(fit, config, judged_by):
    assert fit(config).code == 0
    Path("runs/tiny/mine.txt").write_text("mine")
    assert fit(judged_by("faulty")).code == 1
    assert Path("runs/tiny-1/mine.txt").read_text() == "mine"
    assert Path("runs/tiny/config.yaml").is_file()


@pytest.mark.slow
def test_validation_keeps_the_files_that_describe_the_run(fit, cli, config):
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]
    assert fit(config).code == 0
    saved = [Path("runs/tiny/config.yaml"), Path("runs/tiny/env.json")]
    for path in saved:
        path.write_text("the run's own")
    result = cli("validate", "--config", "config.yaml")
    assert result.code == 0
    assert [path.read_text() for path in saved] == ["the run's own"] * 2
    assert result.out.count("val/response_tokens_mean") == 1  # the line of Console, without Lightning's table


def test_validation_of_a_checkpoint_that_is_not_there_says_only_that(cli, config):
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]
    Path("config.yaml").write_text(yaml.safe_dump(config))
    result = cli("validate", "--config", "config.yaml", "--ckpt_path", "last")
    assert (result.code, "starts from the beginning" in result.out) == (2, False)
    assert "runs/tiny has no last checkpoint to validate: remove --ckpt_path" in result.err


@pytest.mark.slow
def test_validation_interval_counts_steps_over_the_ends_of_epochs(fit, config):
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]  # 12 rows, 3 batches
    config["trainer"] |= {"max_steps": 8, "val_check_interval": 4}
    assert fit(config).code == 0
    rows = csv.DictReader(Path("runs/tiny/metrics.csv").read_text().splitlines())
    assert [row["step"] for row in rows if row["val/truncated_fraction"]] == ["0", "4", "8"]


@pytest.mark.slow
def test_validation_table_of_lightning_is_printed_with_verbose(fit, cli, config):
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]
    assert fit(config).code == 0
    result = cli("validate", "--config", "config.yaml", "--verbose", "true")
    assert result.out.count("val/response_tokens_mean") == 2


def test_run_directory_that_is_a_file_is_rejected(fit, config):
    Path("taken").write_text("mine")
    result = fit(config, "--trainer.default_root_dir", "taken")
    assert (result.code, result.out) == (2, "")
    assert result.err == "lightning-rlhf: trainer.default_root_dir 'taken' is a file: set it to a directory\n"


@pytest.mark.slow
def test_trial_run_writes_no_files(fit, config):
    assert fit(config).code == 0
    before = sorted(Path("runs").rglob("*"))
    assert fit(config, "--trainer.fast_dev_run", "1").code == 0
    assert [path for path in sorted(Path("runs").rglob("*")) if "engine" not in str(path)] == [
        path for path in before if "engine" not in str(path)
    ]


def test_directory_without_a_run_is_not_renamed(fit, config):
    notes = Path("runs/tiny/notes.txt")
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    assert fit(config).code == 0
    assert notes.read_text() == "mine"
    assert not Path("runs/tiny-1").exists()


# -- every configuration -----------------------------------------------------------------------------------------------


def contains(read, inputs):
    """Return whether ``read`` contains all given values; it may have defaults in addition."""
    if not isinstance(inputs, dict):
        return read == inputs
    return all(contains(read[name], value) for name, value in inputs.items())


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_is_parsed(cli, path):
    result = cli("fit", *algorithm_tables.arguments(path), "--print_config")
    assert result.code == 0, result.err
    read, inputs = yaml.safe_load(result.out), algorithm_tables.values(path)
    assert read["model"]["class_path"].rpartition(".")[2] == inputs["model"]["class_path"].rpartition(".")[2]
    for name, value in inputs["trainer"].items():
        if name not in ("callbacks", "logger"):
            assert contains(read["trainer"][name], value), name
    assert len(read["trainer"]["callbacks"]) == len(inputs["trainer"]["callbacks"])


# -- processes ---------------------------------------------------------------------------------------------------------


def test_version_is_printed_quickly():
    began = time.monotonic()
    shown = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert time.monotonic() - began < 5  # importing torch alone takes longer on a busy machine
    assert shown.stdout.startswith("lightning-rlhf 0.")


@pytest.mark.slow
def test_command_exits_with_the_code_and_one_line(tmp_path, config):
    config["model"]["init_args"]["minibatch_size"] = 3
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_quickstart_runs_for_two_steps_each(cli):
    tiny = ["--data.init_args.train.init_args.num_rows", "256", "--data.init_args.val.init_args.num_rows", "8"]
    for stage in ("sft", "reward", "ppo"):
        config = yaml.safe_load((ROOT / f"configs/quickstart/{stage}.yaml").read_text())
        for callback in config["trainer"]["callbacks"]:
            name = callback["class_path"].rpartition(".")[2] if isinstance(callback, dict) else callback
            if name == "PolicyCheck":
                callback["init_args"]["num_samples"] = 8
            if name == "RolloutLoop":
                callback["init_args"]["engine"] = "lightning_rlhf.rollout.transformers.TransformersEngine"
        Path(f"{stage}.yaml").write_text(yaml.safe_dump(config))
        result = cli(
            "fit", "--config", f"{stage}.yaml", *tiny, "--trainer.max_steps", "2", "--trainer.val_check_interval", "1"
        )
        assert (result.code, result.err, result.warned) == (0, "", [])
        assert Path(f"runs/quickstart/{stage}/export/model.safetensors").is_file()
    assert "correct answers, greedy" in result.out


@pytest.mark.parametrize(("row", "expected"), [({"a": "b"}, True), (None, False)])
def test_invalid_row_raises_an_expected_error_and_a_bug_does_not(row, expected):
    with pytest.raises((ValueError, TypeError)) as raised:
        text_of(row, "c")  # a rejected row, and a TypeError from inside our package
    assert isinstance(raised.value, ExpectedError) == expected


def interrupted(completions):
    """Raise KeyboardInterrupt in the second step; the first call is the trial call before the run."""
    CALLS.append(len(completions))
    if len(CALLS) == 3:
        raise KeyboardInterrupt
    return [0.0] * len(completions)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("every", [1, 10])
def test_interrupted_run_saves_the_last_step_and_prints_the_resume_command(fit, config, judged_by, every):
    judged_by("interrupted")
    checkpoints = {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": {"every_n_steps": every}}
    config["trainer"]["callbacks"].append(checkpoints)
    result = fit(config)
    goes_on = "to resume from step 1, add --ckpt_path last to the same command (runs/tiny/checkpoints/last.ckpt)"
    assert (result.code, result.err) == (130, f"lightning-rlhf: ended by Ctrl-C after step 1; {goes_on}\n")
    assert fit(config, "--ckpt_path", "last").code == 0
    steps = [line.split(",")[0] for line in Path("runs/tiny/metrics.csv").read_text().splitlines()]
    assert steps == ["step", "1", "2"]


@pytest.mark.slow
def test_validate_keeps_the_table_of_the_run_and_logs_the_step_of_the_checkpoint(fit, cli, config, monkeypatch):
    rows = {"class_path": "lightning_rlhf.tasks.addition.Problems", "init_args": {"num_rows": 4, "held_out": True}}
    config["data"]["init_args"]["val"] = rows
    assert fit(config).code == 0
    table = Path("runs/tiny/metrics.csv").read_bytes()
    assert len(table.splitlines()) == 1 + 2 + 2  # two steps, and a validation before and after them
    read = []
    monkeypatch.setattr(main, "with_run_ids", lambda entries, directory: read.append(directory) or entries)
    for arguments, step in ((["--ckpt_path", "last"], 2), ([], 0)):
        result = cli("validate", "--config", "config.yaml", *arguments)
        assert result.code == 0, result.err
        assert read == [Path("runs/tiny")]  # the loggers continue the run of the checkpoint, and of no other validation
        assert f"step {step}: val/" in result.out
        assert Path("runs/tiny/metrics.csv").read_bytes() == table


@pytest.mark.slow
def test_resumed_run_keeps_the_responses_of_steps_before_its_checkpoint(fit, config):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.RunCheckpoint")
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]
    assert fit(config).code == 0
    folder = Path("runs/tiny/rollouts")
    (folder / "step-000009.jsonl").write_text("")  # of steps that the checkpoint does not have
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"step-000001.jsonl", "step-000002.jsonl", "validation-000000.jsonl"} < before.keys()
    assert fit(config, "--ckpt_path", "last", "--trainer.max_steps", "3").code == 0
    after = {path.name: path.read_text() for path in folder.iterdir()}
    assert after.keys() - before.keys() == {"step-000003.jsonl", "validation-000003.jsonl"}
    assert before.keys() - after.keys() == {"step-000009.jsonl"}
    assert all(after[name] == text for name, text in before.items() if name in after)


def test_interrupted_run_without_checkpoints_prints_no_resume_command(fit, config, judged_by):
    judged_by("interrupted")
    config["trainer"]["enable_checkpointing"] = False
    result = fit(config)
    message = "lightning-rlhf: ended by Ctrl-C after step 1; it cannot be resumed, because it has no RunCheckpoint\n"
    assert (result.code, result.err) == (130, message)


def test_read_only_directory_is_rejected_before_an_earlier_run_is_renamed(fit, config, monkeypatch):
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.yaml").write_text("earlier")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "runs" and access(path, mode))
    result = fit(config)
    assert (result.code, Path("runs/tiny/config.yaml").read_text()) == (2, "earlier")
    assert "no permission to write in" in result.err
    assert "set it to another directory" in result.err


class YAMLParser:
    def dump(self, config, **options):
        return yaml.safe_dump(config)


def killed(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("earlier", ["", yaml.safe_dump({"ckpt_path": None, "seed": 1})])
def test_run_killed_while_writing_its_configuration_can_be_resumed(earlier, tmp_path, monkeypatch):
    trainer = SimpleNamespace(
        fast_dev_run=False, is_global_zero=True, default_root_dir=tmp_path, loggers=[], global_step=3
    )
    (tmp_path / "config.yaml").write_text(earlier)  # empty: killed in a release that wrote it in place
    parser = YAMLParser()
    callback = SaveRunConfig(parser, {"ckpt_path": None, "seed": 2})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            callback.setup(trainer, None, "fit")
    assert (tmp_path / "config.yaml").read_text() == earlier
    callback = SaveRunConfig(parser, {"ckpt_path": "last", "seed": 2})
    callback.setup(trainer, None, "fit")
    callback.on_train_start(trainer, None)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml"} | ({"config-3.yaml"} if earlier else set())
