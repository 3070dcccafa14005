"""A run on the responses of another one: the same numbers for the same loss, others for another, and bad input."""

import re
import subprocess
import sys
from functools import partial

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_rlhf.__main__ import _expanded
from lightning_rlhf.callbacks import DynamicSampling
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.recorded_rollouts.engine import RecordedEngine
from lightning_rlhf.extras.recorded_rollouts.recorder import RolloutRecorder, step_file
from lightning_rlhf.modules.algorithms import ReMaxModule
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.policy_losses import ReinforceLoss
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.cli.conftest import PPO
from tests.environments import worlds
from tests.stand_ins import TinyModel


class Seen(Callback):
    """Keeps the responses and the metrics of each step."""

    def __init__(self):
        self.responses = []
        self.metrics = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        rollout = pl_module.last_step.experience.rollout
        self.responses.append((rollout.response_ids.tolist(), rollout.rollout_logprobs.tolist()))
        of_time = ("time/", "perf/", "rollout/tokens_per_s")
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.metrics.append({name: value for name, value in values.items() if not name.startswith(of_time)})


def varied(completions):
    return [float(len(set(text)) % 3) for text in completions]


def trained(run, directory, engine, loop=(), model=(), recorder=True, steps=4, data=(), **parts):
    seen = Seen()
    made = run(
        loop={
            "engine": engine, "group_size": 2, "validate_at_ends": False, "rewards": [RewardFunction(varied)],
            **dict(loop),
        },
        model={"actor": TinyModel(), "minibatch_size": 4, **dict(model)},
        data={"batch_size": 2, **dict(data)},
        trainer={"max_steps": steps, "max_epochs": -1, "default_root_dir": directory},
        callbacks=[seen, *([RolloutRecorder()] if recorder else [])],
        **parts,
    )  # fmt: skip
    made.fit()
    made.seen = seen
    return made


def weights(made):
    return [parameter.detach() for parameter in made.module.actor.parameters()]


STALE = {"correction": RolloutCorrection(level="token")}


@pytest.mark.parametrize(
    ("loop", "model", "parts"),
    [
        ({}, {}, {}),
        ({"max_staleness": 1}, STALE, {}),
        ({"dynamic_sampling": DynamicSampling(1)}, {"minibatch_size": 2}, {}),
        ({"top_p": 0.9, "top_k": 5}, {}, {}),
        (
            {"environment": EnvironmentSettings(worlds.Counts, max_turns=2, bridge="plain"), "max_response_tokens": 12},
            {},
            {},
        ),
    ],
    ids=["plain", "stale", "dynamic", "limits", "environment"],
)
def test_same_loss_gives_the_same_numbers(run, tmp_path, loop, model, parts):
    loop = {"check_rows": 0, "max_logprob_diff": 30.0, **loop}
    first = trained(run, tmp_path / "first", TransformersEngine(), loop, model, **parts)
    again = trained(run, tmp_path / "again", RecordedEngine(str(tmp_path / "first")), loop, model, **parts)
    assert again.seen.responses == first.seen.responses
    differing = {"rollout/tokens_per_s"}
    for ours, theirs in zip(again.seen.metrics, first.seen.metrics, strict=True):
        same = {name: value for name, value in theirs.items() if name in ours and name not in differing}
        assert {name: ours[name] for name in same} == pytest.approx(same, abs=0, rel=0, nan_ok=True)
        assert "loss/policy" in same
    assert all(map(torch.equal, weights(first), weights(again)))


def test_greedy_baselines_are_recorded_too(run, tmp_path):
    sgd = partial(torch.optim.SGD, lr=0.1)

    def remax(name, engine):
        made = run(trainer={"max_steps": 2, "default_root_dir": tmp_path / name}, callbacks=[RolloutRecorder()])
        made.module = ReMaxModule(TinyModel(), optimizer=sgd, minibatch_size=2)
        made.loop.engine, made.loop.validate_at_ends = engine, False
        return weights(made.fit())

    first = remax("first", TransformersEngine())
    assert all(map(torch.equal, first, remax("again", RecordedEngine(str(tmp_path / "first")))))


def test_other_loss_learns_something_else_from_the_same_responses(run, tmp_path):
    first = trained(run, tmp_path / "first", TransformersEngine())
    engine = RecordedEngine(str(tmp_path / "first"))
    other = trained(run, tmp_path / "other", engine, model={"policy_loss": ReinforceLoss(), "update_epochs": 2})
    assert other.seen.responses == first.seen.responses
    assert not all(map(torch.equal, weights(first), weights(other)))


def test_new_run_removes_the_files_of_an_earlier_one(run, tmp_path):
    trained(run, tmp_path, TransformersEngine(), steps=3)
    trained(run, tmp_path, TransformersEngine(), steps=2)
    assert [step_file(tmp_path, step).is_file() for step in range(3)] == [True, True, False]


def test_file_of_a_step_is_values_and_tensors(run, tmp_path):
    trained(run, tmp_path, TransformersEngine(), steps=2)
    (part,) = torch.load(step_file(tmp_path, 1), weights_only=True)
    assert part["step"] == 1
    assert part["samples"] == 2
    assert len(part["prompts"]) == 2
    assert len(part["tokens"]) == 4
    assert not list(tmp_path.glob("rollouts/*.new"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 5}, "has no recorded responses of step 5: set trainer.max_steps to 4"),
        (
            {"loop": {"group_size": 4}, "model": {"minibatch_size": 8}},
            "has group_size 2 at temperature 1, but this run",
        ),
        (
            {"loop": {"temperature": 0.5}},
            "has group_size 2 at temperature 1, but this run",
        ),
        ({"data": {"shuffle": False}}, "a prompt of step 1 is not that of the step recorded in"),
        ({"loop": {"validate_at_ends": True}, "data": {"val": None}}, None),
    ],
)
def test_other_runs_are_rejected(run, tmp_path, changes, message):
    trained(run, tmp_path / "first", TransformersEngine())
    engine = RecordedEngine(str(tmp_path / "first"))
    again = partial(trained, run, tmp_path / "again", engine, recorder=False)
    if message is None:  # there are no validation data
        again(**changes)
        return
    with pytest.raises(UsageError, match=re.escape(message)):
        again(**changes)


def test_engine_generates_nothing_and_needs_a_recorded_run(run, tmp_path):
    with pytest.raises(UsageError, match=r"has no recorded responses of the first step .* add the callback"):
        RecordedEngine(str(tmp_path / "none"))
    trained(run, tmp_path / "first", TransformersEngine())
    engine = RecordedEngine(str(tmp_path / "first"))
    with pytest.raises(UsageError, match="has the responses of training steps only: set check_rows: 0"):
        engine.request([], [], [])


def test_option_stands_for_the_settings_of_such_a_run():
    for given in (["--rollouts-from", "runs/a"], ["--rollouts-from=runs/a"]):
        expanded = _expanded(["fit", "-c", "x.yaml", *given, "--seed_everything", "1"])
        assert expanded[:3] == ["fit", "--config", "x.yaml"]
        assert expanded[3].startswith("--rollout.engine=")
        engine = yaml.safe_load(expanded[3].partition("=")[2])
        assert engine["class_path"] == f"{RecordedEngine.__module__}.{RecordedEngine.__name__}"
        assert engine["init_args"] == {"run": "runs/a"}
        assert "--rollout.check_rows=0" in expanded
        assert expanded[-2:] == ["--seed_everything", "1"]
    assert _expanded(["fit", "--rollouts-from"]) == ["fit", "--rollouts-from"]


@pytest.mark.slow
def test_command_repeats_a_run(tmp_path):
    settings = yaml.safe_load(yaml.safe_dump(PPO))
    settings["trainer"]["callbacks"].append(f"{RolloutRecorder.__module__}.RolloutRecorder")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))

    def fit(*options):
        command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    def column(name, *names):
        lines = (tmp_path / "runs" / name / "metrics.csv").read_text().splitlines()
        header = lines[0].split(",")
        return [[line.split(",")[header.index(each)] for each in names] for line in lines[1:]]

    first = fit()
    assert first.returncode == 0, first.stderr
    again = fit("--rollouts-from", "runs/tiny", "--trainer.default_root_dir", "runs/again")
    assert again.returncode == 0, again.stderr
    assert "Rollouts by RecordedEngine" in again.stdout
    names = ("loss/policy", "reward/mean", "loss/value", "grad_norm/actor")
    known = [name for name in names if name in (tmp_path / "runs/tiny/metrics.csv").read_text().split("\n")[0]]
    assert len(known) >= 3
    steps = [row for row in column("tiny", *known) if row[0]]
    assert [row for row in column("again", *known) if row[0]] == steps
    assert len(steps) == 2
