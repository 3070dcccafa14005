"""RolloutLog: prompts, responses and rewards are written completely."""

import json
from datetime import date
from decimal import Decimal

import pytest

from lightning_rlhf.callbacks import DynamicSampling, RolloutLog
from lightning_rlhf.callbacks.rollout_log import _short
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.rewards.function import RewardFunction


def rows_of(directory, step):
    return [json.loads(line) for line in (directory / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]


def test_each_step_leaves_a_file_with_every_response(run, tmp_path):
    run(texts=["a", "ab", "gfed"], loop={"group_size": 2}, data={"shuffle": False}, callbacks=[RolloutLog()]).fit()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
    rows = rows_of(tmp_path, 2)
    assert [row["prompt"] for row in rows] == ["ccc", "ccc", "d", "d"]
    assert [row["response"] for row in rows] == ["a", "ab", "gfed", "a"]
    assert [row["truncated"] for row in rows] == [False, False, True, False]
    assert [row["group"] for row in rows] == [0, 0, 1, 1]
    assert {row["policy_version"] for row in rows} == {1}
    assert [row["reward"] for row in rows_of(tmp_path, 1)] == [row["rewards"]["exact"] for row in rows_of(tmp_path, 1)]
    assert rows_of(tmp_path, 1)[0]["rewards"] == {"exact": 1.0}


ANSWERS = {"a": "1", "bb": "2", "ccc": "3", "d": "4"}


@pytest.mark.parametrize("columns", [{"ground_truth": "result"}, {"answer": "result"}, {"ground_truth": "deep.result"}])
@pytest.mark.parametrize("sampling", [None, DynamicSampling(prompts_per_step=2)])
def test_each_response_has_the_right_answer_from_any_column(run, tmp_path, columns, sampling):
    rows = [{"prompt": prompt, "result": answer, "deep": {"result": answer}} for prompt, answer in ANSWERS.items()]
    judge = RewardFunction(lambda completions: [float(i % 2) for i in range(len(completions))], name="judge")
    loop = {"rewards": [judge], "group_size": 2, "dynamic_sampling": sampling}
    data = {"train": InMemory(rows), "columns": columns, "batch_size": 4 if sampling else 2}
    run(loop=loop, data=data, callbacks=[RolloutLog(table_every_n_steps=0)]).fit()
    found = rows_of(tmp_path, 1)
    assert len(found) == 4
    assert [row["ground_truth"] for row in found] == [ANSWERS[row["prompt"]] for row in found]
    assert len({row["prompt"] for row in found}) == 2


def test_right_answers_that_json_has_no_words_for_are_written_as_text(run, tmp_path, capsys):
    answers = {"a": Decimal("1.50"), "bb": date(2026, 11, 21), "ccc": b"3", "d": "\ud800"}
    rows = InMemory([{"prompt": prompt, "ground_truth": answer} for prompt, answer in answers.items()])
    judge = RewardFunction(lambda completions: [0.0] * len(completions), name="judge")
    data = {"train": rows, "batch_size": 4, "shuffle": False}
    run(loop={"rewards": [judge]}, data=data, callbacks=[RolloutLog(table_every_n_steps=1)]).fit()
    assert [row["ground_truth"] for row in rows_of(tmp_path, 1)] == ["1.50", "2026-11-21", "b'3'", "\ud800"]
    assert "│ \\ud800" in capsys.readouterr().out


def test_at_most_max_rows_are_written(run, tmp_path):
    run(callbacks=[RolloutLog(max_rows=1)]).fit()
    assert len(rows_of(tmp_path, 1)) == 1


def test_a_table_when_it_is_due_best_first(run, capsys):
    run(callbacks=[RolloutLog(table_every_n_steps=2, table_rows=2)], texts=["d", "c"], data={"shuffle": False}).fit()
    shown = capsys.readouterr().out
    assert shown.count("best to worst") == 1
    assert "Responses of step 2" in shown


def test_reward_text_is_not_interpreted_as_markup(run, capsys):
    log = RolloutLog()
    row = {"prompt": "[bold]x[/bold]", "response": "[/nothing]", "reward": 1.0, "rewards": {}}
    log._print_table([row], 3)
    assert "[bold]x[/bold]" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_the_table_spans_from_best_to_worst(capsys, count):
    rows = [{"prompt": "p", "response": f"answer{i}", "reward": float(i), "rewards": {}} for i in range(count)]
    RolloutLog(table_rows=3)._print_table(rows, 1)
    shown = capsys.readouterr().out
    assert f"answer{count - 1}" in shown
    assert "answer0" in shown


def test_a_trial_run_leaves_nothing(run, tmp_path):
    run(callbacks=[RolloutLog(table_every_n_steps=1)], trainer={"fast_dev_run": 1}).fit()
    assert not (tmp_path / "rollouts").exists()


def test_long_text_is_cut_in_the_middle():
    assert _short(" " + "x" * 300) == "x" * 300
    cut = _short("a" * 400 + "b" * 400)
    assert cut.startswith("a" * 150 + " ... ")
    assert cut.endswith(" ... " + "b" * 150)


def test_values_of_tokens_are_written_up_to_their_limit(run, tmp_path):
    log = RolloutLog(max_token_values=7)
    own = run(texts=["a", "ab", "gfed"], loop={"group_size": 2}, data={"shuffle": False}, callbacks=[log]).fit()
    rows = rows_of(tmp_path, 2)  # responses of 2, 3, 4 and 2 tokens, end tokens included
    assert ["tokens" in row for row in rows] == [True, True, False, False]
    values = rows[1]["tokens"]
    assert values["texts"] == ["a", "b", "</s>"]
    assert {len(column) for column in values.values()} == {3}
    experience = own.module.experience
    for name, expected in (
        ("logprob", experience.old_logprobs),
        ("rollout_logprob", experience.rollout.rollout_logprobs),
        ("ref_logprob", experience.ref_logprobs),
        ("entropy", experience.entropies),
        ("advantage", experience.advantages),
        ("weight", experience.weights),
    ):
        assert values[name] == pytest.approx(expected[1, :3].tolist(), abs=1e-4)
    assert values["ids"] == experience.rollout.response_ids[1, :3].tolist()
    assert min(values["entropy"]) > 0
    assert values["version"] == [1, 1, 1]
    assert values["sampled"] == values["in_loss"] == [True, True, True]
