"""Output of a run without a terminal."""

import itertools
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import Pretrained, SFTModule
from lightning_rlhf.callbacks import Console, MetricsCSV
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.extras.console import console
from lightning_rlhf.extras.console.console import _count, remaining_time, reward_model_accuracy
from lightning_rlhf.extras.console.held_out import (
    before_and_after,
    left_to_learn,
    unchanged_kinds,
    whether_to_continue,
)
from lightning_rlhf.extras.records.val_metrics import number, shown_names, with_interval
from lightning_rlhf.rewards.function import RewardFunction
from tests.callbacks.conftest import ROWS, exact
from tests.stand_ins import TinyModel, quiet_trainer, responses, rollout_of


def test_description_has_models_data_and_batch_arithmetic(run, capsys, tmp_path):
    run(loop={"group_size": 4}, model={"update_epochs": 3}, data={"val": InMemory(ROWS)}, callbacks=[Console()]).fit()
    screen = capsys.readouterr().out
    assert "PPOModule: actor " in screen
    assert "train data: 4 rows read, 4 kept" in screen
    assert "one step: 2 prompts x 4 = 8 responses, 3 x 4 mini-batches of 2 = 12 updates; 2 steps" in screen
    assert "rollouts: a script, at most 4 tokens" in screen
    assert f"run directory: {tmp_path}" in screen


def test_description_has_the_weights_of_the_rewards(run, capsys):
    rewards = [RewardFunction(exact, name="whole"), RewardFunction(exact, name="part", weight=0.5)]
    run(loop={"rewards": rewards, "val_metric": "whole"}, callbacks=[Console()]).fit()
    assert "reward: 1 x whole + 0.5 x part" in capsys.readouterr().out.splitlines()


def test_first_validation_is_compared_with_the_most_frequent_answer(run, capsys):
    run(data={"val": InMemory([{**row, "answer": "a"} for row in ROWS])}, callbacks=[Console()]).fit()
    assert "a model that always answers 'a' is correct for 1.000" in capsys.readouterr().out


def test_one_line_is_printed_per_step_and_per_validation(run, capsys):
    run(data={"val": InMemory(ROWS)}, callbacks=[Console()]).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2", "step 2"]
    assert lines[0].startswith("step 0: val/")
    assert "val/fraction_correct_greedy 0.5" in lines[0]
    assert "reward/mean " in lines[1]
    assert "reward/exact " in lines[1]
    for name in ("val/fraction_correct_greedy", "reward/max", "advantage/mean"):
        assert name not in lines[1]


def test_lines_can_be_printed_every_n_steps(run, capsys):
    run(trainer={"max_epochs": 2}, callbacks=[Console(every_n_steps=3)]).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 3"]


def test_sources_of_a_mixture_have_a_line(run, capsys):
    class Sources(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            for name, value in (("loss", 0.25), ("reward", 0.5), ("entropy", 1.0)):
                pl_module.log(f"mixture/math/{name}", value)

    run(callbacks=[Console(), Sources()]).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if "mixture/" in line]
    assert lines[0] == "step 1: mixture/math/loss 0.25  mixture/math/reward 0.5"


def test_module_without_rollouts_is_described_too(run, capsys, tmp_path):
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


def test_rollouts_may_come_from_a_custom_callback(run, capsys):
    made = run(callbacks=[Console(), Feeder()])
    made.trainer.callbacks.remove(made.loop)
    made.fit()
    assert "one step: 2 rows, one update; 2 steps" in capsys.readouterr().out
    assert made.metrics["reward/given"] != 0


def test_accuracy_of_the_reward_model_is_printed(run, tmp_path):
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
def test_counts_are_abbreviated(number, shown):
    assert _count(number) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.12345, "0.123"), (-3.0, "-3"), (12345.6, "12346"), (1e-5, "1e-05")])
def test_numbers_are_abbreviated(value, shown):
    assert number(value) == shown


def slow(completions):
    time.sleep(0.3)
    return [0.0] * len(completions)


def test_long_step_prints_its_progress(run, capsys, monkeypatch):
    monkeypatch.setattr(console, "_UNKNOWN_SECONDS", 0.1)
    made = run(
        loop={"rewards": [RewardFunction(slow, dry_call=False)]}, trainer={"max_steps": 1}, callbacks=[Console()]
    )
    made.trainer.callbacks.sort(key=lambda callback: not isinstance(callback, Console))  # it precedes the rollout
    made.fit()
    lines = capsys.readouterr().out.splitlines()
    assert "step 1: running (0 s)" in lines
    time.sleep(0.3)
    assert "running" not in capsys.readouterr().out


def test_waiting_before_the_first_step_is_explained(run, capsys, monkeypatch):
    monkeypatch.setattr(console, "_WAITING_SECONDS", 0.1)
    rewards = [RewardFunction(slow, dry_call=False)]
    made = run(loop={"rewards": rewards}, data={"val": InMemory(ROWS)}, trainer={"max_steps": 1}, callbacks=[Console()])
    made.trainer.callbacks.sort(key=lambda callback: not isinstance(callback, Console))
    made.fit()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("validation, batch 1 of ") and line.endswith(" (0 s)") for line in lines)


METRICS = {
    "val/fraction_correct_greedy": 0.875,
    "val/fraction_correct_greedy_low": 0.807, "val/fraction_correct_greedy_high": 0.922, "val/pass@4": 1.0,
    "val/env/fault_died": 0.0, "val/exact_greedy": 0.875, "val/exact_best@4": 1.0, "val/fields_greedy": 0.9,
    "val/response_tokens_mean": 12.0,
}  # fmt: skip


def test_metric_that_was_shown_stays_when_it_later_equals_another(capsys):
    console, metrics = Console(), {"val/fraction_correct_greedy": 0.5, "val/fraction_correct_sampled": 0.5}
    trainer = SimpleNamespace(
        sanity_checking=False,
        is_global_zero=True,
        global_step=8,
        callbacks=[],
        progress_bar_callback=None,
        training=True,
    )
    for parts in (0.75, 0.5):
        of_parts = {"val/parts_greedy": parts, "val/parts_sampled": parts}
        trainer.callback_metrics = {name: torch.tensor(value) for name, value in (metrics | of_parts).items()}
        console.on_validation_end(trainer, None)
    first, second = capsys.readouterr().out.splitlines()
    assert "val/parts_sampled 0.75" in first
    assert "val/parts_sampled 0.5" in second


def test_line_of_a_long_step_has_the_seconds_of_the_steps_before(run, capsys, monkeypatch):
    monkeypatch.setattr(console, "_HEARTBEAT_SECONDS", 0.1)
    options = {"loop": {"rewards": [RewardFunction(slow, dry_call=False)]}, "callbacks": [Console()]}
    made = run(trainer={"max_steps": 2}, **options)
    made.trainer.callbacks.sort(key=lambda callback: not isinstance(callback, Console))
    made.fit()
    shown = capsys.readouterr().out
    assert re.search(r"^step 2: running, steps before took [\d.]+ s \(\d+ s\)$", shown, re.MULTILINE)


def test_few_responses_with_a_reward_are_reported_if_the_interval_excludes_more():
    metrics = {"val/fraction_correct_greedy": 0.141, "val/fraction_correct_sampled": 0.047}
    assert "begins slowly" in left_to_learn(metrics)
    assert "begins slowly" in left_to_learn({**metrics, "val/fraction_correct_sampled_high": 0.049})
    assert left_to_learn({**metrics, "val/fraction_correct_sampled_high": 0.098}).endswith(
        "something to learn, if this is more than guessing"
    )


def test_validation_metrics_are_shown_once():
    names = ["val/fraction_correct_greedy", "val/pass@4", "val/fields_greedy", "val/response_tokens_mean"]
    assert shown_names(METRICS) == names
    assert "val/exact_greedy" in shown_names({**METRICS, "val/exact_greedy": 0.8})
    by_chance = {**METRICS, "val/fraction_correct_sampled": 0.5, "val/exact_sampled": 0.4}
    assert "val/exact_greedy" in shown_names(by_chance)  # not the same reward
    assert with_interval("val/fraction_correct_greedy", METRICS) == "0.875 (0.807 to 0.922)"
    assert with_interval("val/response_tokens_mean", METRICS) == "12"


@pytest.mark.parametrize(
    ("greedy", "sampled", "expected"),
    [
        (0.0, 0.0, "nothing to learn from. The first remedy is an example"),
        (0.25, 0.0, "few responses have a reward, so that learning begins slowly. The first remedy is an"),
        (0.99, 0.96, "little is left to learn"),
        (0.875, 0.164, "the most likely answers are right already"),
        (1.0, 0.875, "the most likely answers are right already"),
        (0.4, 0.3, "there is something to learn"),
        (3.0, 0.3, ""),
    ],
)
def test_validation_before_training_estimates_the_room_for_improvement(greedy, sampled, expected):
    for pair in (
        ("val/fraction_correct_greedy", "val/fraction_correct_sampled"),
        ("val/right_greedy", "val/right_sampled"),
    ):
        message = left_to_learn(dict(zip(pair, (greedy, sampled), strict=True)))
        assert expected in message
        assert bool(message) == bool(expected)
    graded = {"val/graded_greedy": 0.1, "val/graded_sampled": 0.03, "val/fraction_correct_greedy": 0.0}
    assert left_to_learn({**graded, "val/fraction_correct_sampled": 0.0}) == (
        "before training, val/fraction_correct is 0.000 for greedy responses and 0.000 for sampled ones, but "
        "val/graded (0.030 for sampled responses) has values to learn from"
    )
    assert "but val/graded (0.030 for" in left_to_learn({**graded, "val/fraction_correct_sampled": 0.02})
    sources = {"val/fraction_correct_greedy": 0.3, "val/fraction_correct_sampled": 0.2}
    for source, value in (("am", 0.38), ("pm", 0.02)):
        sources |= {f"val/{source}/fraction_correct_{kind}": value for kind in ("greedy", "sampled")}
    assert left_to_learn(sources).endswith(
        ": there is something to learn, but little from pm (0.020 for sampled responses), where few responses have a "
        "reward. The first remedy is an example of each kind in the prompts, if they have none; others are on the "
        "documentation's page 'Prompts for a small model'"
    )
    two = {f"val/{name}_{kind}": 0.5 for name in ("a", "b") for kind in ("greedy", "sampled")}
    assert left_to_learn(two) == left_to_learn({}) == ""
    assert left_to_learn({**two, "val/fraction_correct_greedy": 0.5, "val/fraction_correct_sampled": 0.5})


@pytest.mark.parametrize(("fraction", "guesses"), [(0.2, True), (0.15, True), (0.1, False), (0.04, False)])
def test_results_of_guessing_are_recognised(fraction, guesses):
    metrics = {"val/fraction_correct_greedy": 0.15, "val/fraction_correct_sampled": 0.12}
    sentence = left_to_learn(metrics, ("Monday", fraction))
    assert ("a model that always answers 'Monday' is correct for" in sentence) == guesses
    assert guesses or sentence.endswith("there is something to learn, if this is more than guessing")


def test_cut_responses_are_named_before_other_remedies():
    metrics = {"val/fraction_correct_greedy": 0.02, "val/fraction_correct_sampled": 0.01}
    cut = {"val/truncated_fraction": 0.4, "val/four/truncated_fraction": 0.952, "val/two/truncated_fraction": 0.1}
    remedy = "max_response_tokens cut 95% of the responses to four: raise it first if correct answers are longer, else"
    assert remedy in left_to_learn({**metrics, **cut})
    assert "cut 60% of the responses to all prompts:" in left_to_learn({**metrics, "val/truncated_fraction": 0.6})


def test_reward_that_equals_correctness_for_one_source_only_is_shown_for_all():
    metrics = {}
    for source, graded in (("am", 0.3), ("pm", 0.1)):
        for kind in ("greedy", "sampled"):
            metrics |= {f"val/{source}/fraction_correct_{kind}": 0.1, f"val/{source}/graded_{kind}": graded}
    assert {"val/am/graded_greedy", "val/pm/graded_greedy"} <= set(shown_names(metrics))
    metrics |= {"val/am/graded_greedy": 0.1, "val/am/graded_sampled": 0.1}
    assert all("graded" not in name for name in shown_names(metrics))


def test_lines_about_work_in_progress_become_rarer(monkeypatch, capsys):
    waits = []

    class Ended:
        def wait(self, seconds):
            waits.append(seconds)
            return len(waits) > 40

    monkeypatch.setattr(console.time, "monotonic", lambda: sum(waits))
    console._print_until(Ended(), lambda: ("starting", 0.0), 5.0)
    assert waits[:5] == [5, 5, 5, 5, 5]
    assert waits[-1] == 60
    assert all(later <= max(5, sum(waits[:i]) / 5) for i, later in enumerate(waits))
    assert f"starting ({sum(waits[:-1]):.0f} s)" in capsys.readouterr().out


def test_seconds_of_new_work_begin_anew(monkeypatch, capsys):
    clock = itertools.count(1)

    class Ended:
        def wait(self, seconds):
            return next(clock) > 3

    monkeypatch.setattr(console.time, "monotonic", lambda: 100.0)
    work = iter([("starting", 93.0), ("starting", 93.0), ("validation", 99.0)])
    console._print_until(Ended(), lambda: next(work), 5.0)
    assert capsys.readouterr().out.splitlines() == ["starting (7 s)", "starting (7 s)", "validation (1 s)"]


def test_seconds_of_a_validation_are_those_of_all_its_batches(monkeypatch):
    made, clock = Console(), itertools.count(10)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(made, "_print_regularly", lambda *_: None)
    trainer = SimpleNamespace(num_val_batches=[3], progress_bar_callback=None)
    seen = []
    for _ in range(2):
        for batch in range(3):
            made.on_validation_batch_start(trainer, None, None, batch)
            seen.append((made._doing, made._doing_since))
    names = [f"validation, batch {number} of 3" for number in (1, 2, 3)]
    assert seen == [*((name, 10) for name in names), *((name, 11) for name in names)]


def test_first_and_last_validation_are_compared():
    def row(step, **changes):
        return {"step": step, **{name: str(value) for name, value in {**METRICS, **changes}.items()}}

    training = {"step": "1", "reward/mean": "0.5"}
    assert before_and_after([training, row("0")]) is None
    later = row(
        "7",
        **{
            "val/fraction_correct_greedy": 0.992,
            "val/fraction_correct_greedy_low": 0.957,
            "val/fraction_correct_greedy_high": 0.999,
            "val/fields_greedy": 1.0,
            "val/fraction_correct_greedy_change": 0.117,
            "val/fraction_correct_greedy_change_low": -0.01,
            "val/fraction_correct_greedy_change_high": 0.244,
        },
    )
    change = "+0.117 (-0.010 to +0.244)"
    assert before_and_after([row("0"), training, later]) == (
        "0",
        "7",
        [
            ("val/fraction_correct_greedy", "0.875 (0.807 to 0.922)", "0.992 (0.957 to 0.999)", change),
            ("val/exact_greedy", "0.875", "0.875", ""),
            ("val/fields_greedy", "0.9", "1", ""),
        ],
    )


def test_each_source_has_a_line(run, capsys):
    rows = [{**row, "source": source} for row, source in zip(ROWS, ("am", "pm", "am", "pm"), strict=True)]
    run(data={"val": InMemory(rows)}, callbacks=[Console()]).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 2: val/")]
    assert [line.split()[2].rpartition("/")[0] for line in lines] == ["val", "val/am", "val/pm"]
    assert all("/pm/" not in line for line in lines[:2])


def test_output_ends_with_the_comparison(run, capsys):
    run(data={"val": InMemory(ROWS)}, callbacks=[Console(), MetricsCSV()]).fit()
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("validation at step 0 -> step 2, 95 % intervals in brackets:")
    assert all("->" in line for line in lines[first:])
    assert any(line.startswith("  val/fraction_correct_greedy") and line.count(" to ") == 3 for line in lines[first:])
    assert any(", change +" in line or ", change -" in line for line in lines[first:])


def test_learning_rates_are_printed(run, capsys):
    run(callbacks=[Console()]).fit()
    assert re.search(r"learning rate: actor [\d.]+ \(\w+\), critic [\d.]+ \(\w+\)\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("steps", "seconds", "line"),
    [
        (97, [130.0, 100.0, 99.0], "97 steps left: about 2.7 hours, at 100 s for a step, without validations"),
        (1, [400.0, 400.0, 1.0], "1 step left: about 7 minutes, at 400 s for a step, without validations"),
        (3, [90.0, 100.0, 110.0], ""),  # five minutes
        (0, [1000.0] * 3, ""),
        (float("inf"), [1000.0] * 3, ""),
    ],
)
def test_remaining_time_is_estimated(steps, seconds, line):
    assert remaining_time(steps, seconds) == line


def test_remaining_time_is_limited_by_max_time():
    assert remaining_time(21, [60.0] * 3, limit=600) == "10 minutes left of max_time: about 10 more steps"
    assert remaining_time(21, [60.0] * 3, limit=-1) == ""  # the time is over
    assert remaining_time(21, [60.0] * 3, limit=3000).startswith("21 steps left: about 21 minutes")


def test_remaining_time_is_printed_after_three_steps_and_each_quarter(run, capsys, monkeypatch):
    monkeypatch.setattr(console, "_SHORT_SECONDS", 0.0)
    run(callbacks=[Console()], trainer={"max_steps": 7, "max_epochs": 10}).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if "left: about" in line]
    assert [line[: line.index(", at ")] for line in lines] == [
        f"{n} left: about 0 minutes" for n in ("4 steps", "3 steps", "1 step")
    ]


def test_run_of_unknown_length_has_no_estimate(run, capsys, monkeypatch):
    monkeypatch.setattr(console, "_SHORT_SECONDS", 0.0)
    run(callbacks=[Console()], trainer={"max_steps": -1, "max_epochs": -1, "max_time": "00:00:00:01"}).fit()
    shown = capsys.readouterr().out
    assert "; any number of steps" in shown
    assert "left: about" not in shown


@pytest.mark.parametrize(("at_ends", "interval", "printed"), [(False, 2, True), (True, 2, False), (False, 1, False)])
def test_unused_validation_data_are_reported(run, capsys, at_ends, interval, printed):
    settings = {"max_steps": 1, "val_check_interval": interval}
    loop = {"validate_at_ends": at_ends}
    run(loop=loop, data={"val": InMemory(ROWS)}, trainer=settings, callbacks=[Console()]).fit()
    line = (
        "val data: not used, because the run ends after 1 step: set trainer.val_check_interval to at most 1, or "
        "validate_at_ends of RolloutLoop to true"
    )
    assert (line in capsys.readouterr().out) is printed


def test_end_of_a_run_names_the_kinds_that_are_not_better():
    def row(step, total, **low):
        metrics = {f"val/{name}/fraction_correct_greedy_change_low": value for name, value in low.items()}
        return {"step": step, "val/fraction_correct_greedy_change_low": total, **metrics, "val/a_greedy": "0.5"}

    before = {"step": "0", "val/fraction_correct_greedy": "0.1"}
    assert unchanged_kinds([before, row("24", "0.15", two="0.5", three="-0.1", four="-0.02")]) == (
        "not better than before training, by their 95 % intervals: four, three"
    )
    assert unchanged_kinds([before, row("24", "0.15", two="0.5", three="0.1")]) == ""
    assert unchanged_kinds([before, row("24", "-0.15", two="-0.5", three="-0.1")]) == ""  # the totals are not, either
    assert unchanged_kinds([before]) == unchanged_kinds([]) == ""


def test_end_of_a_run_states_whether_more_steps_may_help():
    def row(step, sampled, greedy=0.5):
        bounds = {f"val/fraction_correct_{kind}_{end}": "" for kind in ("greedy", "sampled") for end in ("low", "high")}
        means = {"val/fraction_correct_sampled": str(sampled), "val/fraction_correct_greedy": str(greedy)}
        for kind, mean in (("sampled", sampled), ("greedy", greedy)):
            bounds[f"val/fraction_correct_{kind}_low"] = str(mean - 0.08)
            bounds[f"val/fraction_correct_{kind}_high"] = str(mean + 0.08)
        return {"step": str(step), **means, **bounds}

    rising = [row(0, 0.1), row(8, 0.2), row(16, 0.31), row(24, 0.3)]
    assert whether_to_continue(rising) == (
        "still better than at step 8 by more than a standard error: more steps may help, such as "
        "--trainer.max_steps 48 --ckpt_path last"
    )
    equal = [row(0, 0.1), row(12, 0.27), row(24, 0.3)]  # 0.03 is less than 0.16 / 4
    assert whether_to_continue(equal).startswith(
        "not better than at step 12 by more than a standard error: more steps may"
    )
    assert "than at step 12" in whether_to_continue([row(0, 0.1), row(12, 0.3, greedy=0.4), row(24, 0.3)])
    assert whether_to_continue([row(0, 0.1), row(24, 0.9)]) == ""  # no validation between them
    most = [row(0, 0.1), row(12, 0.5), row(24, 0.96, greedy=0.9)]
    assert whether_to_continue(most) == "0.960 of the responses are correct: little is left for more steps"
    assert whether_to_continue([{"step": "0", "val/loss": "1"}, {"step": "4", "val/loss": "0.5"}]) == ""


def test_end_of_a_run_that_learned_nothing_is_not_called_better():
    def row(step, sampled, low, high):
        metrics = {"val/fraction_correct_sampled": sampled, "val/fraction_correct_greedy": sampled}
        for kind in ("sampled", "greedy"):
            name = f"val/fraction_correct_{kind}"
            metrics |= {f"{name}_low": sampled - 0.02, f"{name}_high": sampled + 0.02}
            metrics |= {f"{name}_change_low": low, f"{name}_change_high": high}
        return {"step": str(step), **{name: str(value) for name, value in metrics.items()}}

    dip = [row(0, 0.15, 0.0, 0.0), row(8, 0.05, -0.2, -0.01), row(24, 0.17, -0.09, 0.11)]
    assert whether_to_continue(dip).startswith("no change since the start that could not be chance")
    assert whether_to_continue([*dip[:2], row(24, 0.17, 0.01, 0.11)]).startswith("still better than at step 8")
    assert whether_to_continue([]) == ""


def test_lines_of_a_validation_have_the_fractions_of_each_source_only(tmp_path, capsys):
    callback, trainer = Console(), quiet_trainer(default_root_dir=tmp_path)
    metrics = {"val/a_greedy": 0.5, "val/one/fraction_correct_greedy": 0.25, "val/one/response_tokens_mean": 7.0}
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    callback.on_validation_end(trainer, None)
    printed = capsys.readouterr().out
    assert "val/one/fraction_correct_greedy 0.25" in printed
    assert "val/a_greedy 0.5" in printed
    assert "response_tokens_mean" not in printed
