"""Report: first and last validation, changed responses first, and the times of all parts."""

import io
import json
from datetime import date

import pytest
from rich.console import Console

from lightning_rlhf.callbacks import MetricsCSV, Report, complete
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.strategies.checkpoints.io import load_plain
from tests.callbacks.conftest import ROWS


def shown(table):
    screen = Console(width=200, record=True, file=io.StringIO())
    screen.print(table)
    return screen.export_text()


def words(table, label):
    (line,) = [line for line in shown(table).splitlines() if label in line]
    return [cell.strip() for cell in line.replace("│", "|").split("|")[1:-1]]


def test_run_ends_with_three_tables_and_a_file(run, capsys, tmp_path):
    made = run(data={"val": InMemory(ROWS)}, callbacks=[Report()])
    made.trainer.callbacks = complete(made.trainer.callbacks)
    made.fit()
    screen = capsys.readouterr().out
    for title in ("Held-out problems", "Greedy responses to held-out problems", "Time of the steps"):
        assert title in screen
    assert f"run directory: {tmp_path}" in screen.replace("\n", "")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["seconds"] > 0
    assert [sample["prompt"] for sample in written["before"]] == [row["prompt"] for row in ROWS]


ROW = {
    "step": "0",
    "val/fraction_correct_greedy": "",
    "val/fraction_correct_sampled": "",
    "reward/mean": "",
    "kl/ref": "",
}


def test_progress_compares_the_first_and_the_last_validation():
    change = {"val/fraction_correct_greedy_change": "0.5"}
    interval = {"val/fraction_correct_greedy_low": "0.2", "val/fraction_correct_greedy_high": "0.3"}
    change |= {"val/fraction_correct_greedy_change_low": "0.25", "val/fraction_correct_greedy_change_high": "0.75"}
    rows = [
        {**ROW, "val/fraction_correct_greedy": "0.25", "val/fraction_correct_sampled": "0.125", **interval},
        {**ROW, "step": "1", "reward/mean": "1.0", "kl/ref": "0.0"},
        {**ROW, "step": "2", "reward/mean": "3.0", "kl/ref": "0.5"},
        {**ROW, "step": "2", "val/fraction_correct_greedy": "0.75", "val/fraction_correct_sampled": "0.5", **change},
    ]
    table = Report().progress(rows)
    assert [column.header for column in table.columns] == ["", "step 0", "step 2", "change"]
    changed = "+0.500 (+0.250 to +0.750)"
    assert words(table, "correct answers, greedy") == ["correct answers, greedy", "0.250", "0.75", changed]
    assert words(table, "training reward")[:3] == ["training reward", "1.000", "3.000"]
    assert words(table, "KL to the reference")[1:3] == ["0.000", "0.500"]


@pytest.mark.parametrize("rows", [[], [{**ROW, "val/fraction_correct_greedy": "1"}], [{**ROW, "reward/mean": "1"}]])
def test_progress_table_needs_validation_and_training(rows):
    assert Report().progress(rows) is None


def test_metrics_that_only_one_part_of_a_resumed_run_has_are_left_out():
    rows = [
        {**ROW, "val/fraction_correct_greedy": "0.25"},
        {**ROW, "step": "1", "reward/mean": "1.0", "kl/ref": "0.1", "reward/generated_mean": "0.5"},
        {**ROW, "step": "2", "reward/mean": "3.0", "reward/generated_mean": ""},
        {**ROW, "step": "2", "val/fraction_correct_greedy": "0.75"},
    ]
    table = Report().progress(rows)
    assert words(table, "training reward")[1:3] == ["1.000", "3.000"]
    assert "KL to the reference" not in shown(table)


def test_responses_are_compared_by_their_prompts():
    report = Report()
    report.load_state_dict({"before": [{"prompt": text, "response": f"{text} then"} for text in ("a", "b")]})
    after = [{"prompt": text, "response": f"{text} now"} for text in ("b", "c")]
    assert words(report.responses(after), "b now") == ["b", "b then", "b now"]
    assert "c now" not in shown(report.responses(after))


def test_changed_answers_come_first():
    report = Report(num_samples=2)
    report._before = [{"prompt": p, "response": r} for p, r in (("p1", "same"), ("p2", "old"), ("p3", "alike"))]
    output = (("p1", "same"), ("p2", "new"), ("p3", "alike"))
    after = [{"prompt": p, "response": r, "ground_truth": "x"} for p, r in output]
    table = report.responses(after)
    assert table.row_count == 2
    assert words(table, "p2") == ["p2", "old", "new", "x"]
    assert words(table, "p1") == ["p1", "same", "same", "x"]
    assert Report().responses([]) is None


def test_data_columns_keep_the_checkpoint_loadable_and_are_not_shown_as_the_answer(run, tmp_path):
    rows = [{"prompt": letter, "response": "not the policy's", "day": date(2026, 11, 21)} for letter in "abcd"]
    judge = RewardFunction(lambda completions: [0.0] * len(completions), name="judge")
    data, report = {"train": InMemory(rows), "val": InMemory(rows)}, Report()
    made = run(data=data, loop={"rewards": [judge]}, callbacks=[MetricsCSV(), report]).fit()
    assert {sample["response"] for sample in report._before} <= {"a", "b"}
    made.trainer.save_checkpoint(tmp_path / "kept.ckpt")
    load_plain(tmp_path / "kept.ckpt")
    assert json.loads((tmp_path / "report.json").read_text())["before"][0]["day"] == "2026-11-21"


def test_right_answer_is_shown_from_any_known_column(run, capsys):
    rows = InMemory([{"prompt": letter, "result": f"{letter}!"} for letter in "abcd"])
    judge = RewardFunction(lambda completions, result: [0.0] * len(completions), name="judge")
    data = {"train": rows, "val": rows, "columns": {"ground_truth": "result"}}
    callbacks = [MetricsCSV(), Report(num_samples=4)]
    run(data=data, loop={"rewards": [judge]}, callbacks=callbacks, trainer={"limit_val_batches": None}).fit()
    shown = capsys.readouterr().out
    assert "correct answer" in shown
    assert all(f"{letter}!" in shown for letter in "abcd")


def test_times_and_shares_add_up_with_a_row_for_the_rest():
    row = {"time/step_s": "10", "time/generate_s": "6", "time/update_s": "3"}
    table = Report().times([row, row, {"val/fraction_correct_greedy": "1"}])
    assert words(table, "generate") == ["generate", "12.0", "60%"]
    assert words(table, "update") == ["update", "6.0", "30%"]
    assert words(table, "other") == ["other", "2.0", "10%"]
    assert Report().times([]) is None


def test_answers_of_the_first_validation_are_restored_after_a_restart():
    report, resumed = Report(), Report()
    report._before = [{"prompt": "p", "response": "r"}]
    resumed.load_state_dict(json.loads(json.dumps(report.state_dict())))
    assert resumed._before == report._before


def test_missing_callbacks_are_reported(run):
    with pytest.raises(ValueError, match="Report needs MetricsCSV among the trainer's callbacks"):
        run(callbacks=[Report()]).fit()
    made = run(callbacks=[Report(), MetricsCSV()])
    made.trainer.callbacks.remove(made.loop)
    with pytest.raises(ValueError, match="Report needs RolloutLoop among the trainer's callbacks"):
        made.fit()


def test_trial_run_prints_no_report(run, capsys, tmp_path):
    run(callbacks=[Report(), MetricsCSV()], trainer={"fast_dev_run": 1}).fit()
    assert "Held-out" not in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()
