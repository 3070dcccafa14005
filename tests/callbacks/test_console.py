"""What a person sees of a run that has no terminal."""

import json

import pytest
from lightning.pytorch import Callback

from lightning_rlhf import Pretrained, SFTModule
from lightning_rlhf.callbacks import Console
from lightning_rlhf.callbacks.console import _count, _number, trust_in_reward_model
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.rewards.adapter import RewardFunction
from tests.callbacks.conftest import ROWS
from tests.stand_ins import TinyModel, quiet_trainer, responses, rollout_of


def test_the_first_screen_says_what_will_run_and_the_arithmetic_of_a_batch(run, capsys, tmp_path):
    run(loop={"group_size": 4}, model={"update_epochs": 3}, data={"val": InMemory(ROWS)}, callbacks=[Console()]).fit()
    screen = capsys.readouterr().out
    assert "PPOModule: actor " in screen
    assert "train data: 4 rows read, 4 kept" in screen
    assert (
        "one step: 2 prompts x 4 = 8 responses, learnt from in 3 x 4 mini-batches of 2 = 12 updates; 2 steps" in screen
    )
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


def none_right(completions, answer):
    return [0.7 * (text == 7) + 0.1 for text in completions]  # a text is no number


def told_apart_at_last(completions, trainer_state):
    return [float(number > 0 and trainer_state.global_step == 2) for number in range(len(completions))]


def half_of_them(completions):
    return [float(number % 2) for number in range(len(completions))]


def of_nothing(completions):
    return [None for _ in completions]


def test_a_reward_that_tells_no_responses_of_the_first_steps_apart_is_told_once(run, caplog):
    rewards = [
        RewardFunction(none_right),
        RewardFunction(none_right, name="only_logged", weight=0.0),
        RewardFunction(told_apart_at_last),
        RewardFunction(half_of_them),
        RewardFunction(of_nothing, dry_call=False),
    ]
    run(loop={"rewards": rewards}, trainer={"max_epochs": 3}, callbacks=[Console()]).fit()
    told = [record.message for record in caplog.records if "gave every response" in record.message]
    assert len(told) == 1
    assert told[0].startswith("reward none_right gave every response 0.1 for 3 steps: nothing is learnt from that")
    assert told[0].endswith("at the responses, which RolloutLog writes to rollouts/")


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
    hands_over_rollouts = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.receive(rollout_of(responses(4, seed=0)))


def test_rollouts_may_come_from_a_callback_of_ones_own(run, capsys):
    made = run(callbacks=[Console(), Feeder()])
    made.trainer.callbacks.remove(made.loop)
    made.fit()
    assert "one step: 2 rows, one update; 2 steps" in capsys.readouterr().out
    assert made.metrics["reward/given"] != 0


def test_what_is_known_of_the_reward_model_is_said(run, tmp_path):
    module = run(model={"reward_model": Pretrained(str(tmp_path))}).module
    assert trust_in_reward_model(module) == []
    (tmp_path / "metrics.json").write_text(json.dumps({"val/pair_accuracy": 0.987, "val/policy_order": 0.5}))
    (line,) = trust_in_reward_model(module)
    assert line.startswith("reward model: orders rightly 0.987 of held-out pairs")
    assert "0.500 of samples of the policy" in line
    (tmp_path / "metrics.json").write_text("{}")
    assert trust_in_reward_model(module) == []
    assert trust_in_reward_model(run().module) == []


@pytest.mark.parametrize(
    ("number", "shown"), [(7, "7"), (999, "999"), (1000, "1.00k"), (2_380_000, "2.38M"), (8 * 10**9, "8.00B")]
)
def test_counts_are_short(number, shown):
    assert _count(number) == shown


@pytest.mark.parametrize(("number", "shown"), [(0.12345, "0.123"), (-3.0, "-3"), (12345.6, "12346"), (1e-5, "1e-05")])
def test_numbers_are_short(number, shown):
    assert _number(number) == shown
