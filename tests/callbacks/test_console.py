"""Output of a run without a terminal."""

import json
import time

import pytest
from lightning.pytorch import Callback

from lightning_rlhf import Pretrained, SFTModule
from lightning_rlhf.callbacks import Console, console
from lightning_rlhf.callbacks.console import _count, _number, remaining_time, reward_model_accuracy
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.rewards.function import RewardFunction
from tests.callbacks.conftest import ROWS
from tests.stand_ins import TinyModel, quiet_trainer, responses, rollout_of


def test_the_description_has_models_data_and_batch_arithmetic(run, capsys, tmp_path):
    run(loop={"group_size": 4}, model={"update_epochs": 3}, data={"val": InMemory(ROWS)}, callbacks=[Console()]).fit()
    screen = capsys.readouterr().out
    assert "PPOModule: actor " in screen
    assert "train data: 4 rows read, 4 kept" in screen
    assert "one step: 2 prompts x 4 = 8 responses, 3 x 4 mini-batches of 2 = 12 updates; 2 steps" in screen
    assert "rollouts: a script, at most 4 tokens" in screen
    assert f"run directory: {tmp_path}" in screen


def test_one_line_per_step_and_one_per_validation(run, capsys):
    run(data={"val": InMemory(ROWS)}, callbacks=[Console()]).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2", "step 2"]
    assert lines[0].startswith("step 0: val/")
    assert "val/greedy 0.5" in lines[0]
    assert "reward/mean " in lines[1]
    assert "reward/exact " in lines[1]
    for name in ("val/greedy", "reward/max", "advantage/mean"):
        assert name not in lines[1]


def test_lines_can_be_rarer(run, capsys):
    run(trainer={"max_epochs": 2}, callbacks=[Console(every_n_steps=3)]).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 3"]


def test_a_module_without_rollouts_has_a_first_screen_too(run, capsys, tmp_path):
    from lightning_rlhf import ConversationDataModule
    from lightning_rlhf.data.tokenizers import CharacterTokenizer

    rows = InMemory([{"prompt": "a", "completion": "b"}] * 4)
    data = ConversationDataModule(rows, CharacterTokenizer("abcdefg"), batch_size=2)
    quiet_trainer(callbacks=[Console()], default_root_dir=tmp_path).fit(SFTModule(TinyModel()), datamodule=data)
    screen = capsys.readouterr().out
    assert "one step: 2 rows, one update; 2 steps" in screen
    assert "step 2: train/loss " in screen


class Feeder(Callback):
    provides_rollouts = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.receive(rollout_of(responses(4, seed=0)))


def test_rollouts_may_come_from_a_callback_of_ones_own(run, capsys):
    made = run(callbacks=[Console(), Feeder()])
    made.trainer.callbacks.remove(made.loop)
    made.fit()
    assert "one step: 2 rows, one update; 2 steps" in capsys.readouterr().out
    assert made.metrics["reward/given"] != 0


def test_the_accuracy_of_the_reward_model_is_printed(run, tmp_path):
    module = run(model={"reward_model": Pretrained(str(tmp_path))}).module
    assert reward_model_accuracy(module) == []
    (tmp_path / "metrics.json").write_text(json.dumps({"val/pair_accuracy": 0.987, "val/policy_order": 0.5}))
    (line,) = reward_model_accuracy(module)
    assert line.startswith("reward model: orders correctly 0.987 of held-out pairs")
    assert "0.500 of samples of the policy" in line
    (tmp_path / "metrics.json").write_text("{}")
    assert reward_model_accuracy(module) == []
    assert reward_model_accuracy(run().module) == []


@pytest.mark.parametrize(
    ("number", "shown"), [(7, "7"), (999, "999"), (1000, "1.00k"), (2_380_000, "2.38M"), (8 * 10**9, "8.00B")]
)
def test_counts_are_short(number, shown):
    assert _count(number) == shown


@pytest.mark.parametrize(("number", "shown"), [(0.12345, "0.123"), (-3.0, "-3"), (12345.6, "12346"), (1e-5, "1e-05")])
def test_numbers_are_short(number, shown):
    assert _number(number) == shown


def slow(completions):
    time.sleep(0.3)
    return [0.0] * len(completions)


def test_a_long_step_prints_that_it_is_under_way(run, capsys, monkeypatch):
    monkeypatch.setattr(console, "_HEARTBEAT_SECONDS", 0.1)
    made = run(
        loop={"rewards": [RewardFunction(slow, dry_call=False)]}, trainer={"max_steps": 1}, callbacks=[Console()]
    )
    made.trainer.callbacks.sort(key=lambda callback: not isinstance(callback, Console))  # it precedes the rollout
    made.fit()
    lines = capsys.readouterr().out.splitlines()
    assert "step 1: running for 0 s" in lines
    time.sleep(0.3)
    assert "under way" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "seconds", "line"),
    [
        (97, [130.0, 100.0, 99.0], "97 steps left: about 2.7 hours, at 100 s for a step, without validations"),
        (1, [400.0, 400.0, 1.0], "1 step left: about 7 minutes, at 400 s for a step, without validations"),
        (3, [90.0, 100.0, 110.0], ""),  # five minutes
        (97, [100.0, 100.0], ""),
        (0, [1000.0] * 3, ""),
        (float("inf"), [1000.0] * 3, ""),
    ],
)
def test_the_remaining_time_is_estimated(steps, seconds, line):
    assert remaining_time(steps, seconds) == line


def test_the_remaining_time_is_printed_once(run, capsys, monkeypatch):
    monkeypatch.setattr(console, "_SHORT_SECONDS", 0.0)
    run(callbacks=[Console()], trainer={"max_steps": 6, "max_epochs": 10}).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if "left: about" in line]
    assert len(lines) == 1
    assert lines[0].startswith("3 steps left: about 0 minutes, at ")


@pytest.mark.parametrize(("at_ends", "interval", "printed"), [(False, 2, True), (True, 2, False), (False, 1, False)])
def test_validation_data_that_are_never_used_are_named(run, capsys, at_ends, interval, printed):
    settings = {"max_steps": 1, "val_check_interval": interval}
    loop = {"validate_at_ends": at_ends}
    run(loop=loop, data={"val": InMemory(ROWS)}, trainer=settings, callbacks=[Console()]).fit()
    line = "val data: not used, because the run ends after 1 step: set trainer.val_check_interval below 2"
    assert (line in capsys.readouterr().out) is printed
