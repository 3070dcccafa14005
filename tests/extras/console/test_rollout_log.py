"""RolloutLog: prompts, responses and rewards are written completely."""

import json
import math
from datetime import date
from decimal import Decimal

import pytest
from lightning.pytorch import Callback

from lightning_rlhf.callbacks import DynamicSampling, RolloutLog
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.extras.console.rollout_log import _short
from lightning_rlhf.extras.console.row_values import own_parts, value_counts
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.rewards.function import RewardFunction
from tests.callbacks.conftest import ROWS
from tests.environments import worlds
from tests.stand_ins import TinyModel


def rows_of(directory, step, kind="step"):
    text = (directory / "rollouts" / f"{kind}-{step:06d}.jsonl").read_text()
    assert "NaN" not in text
    return [json.loads(line) for line in text.splitlines()]


def files_of(directory):
    return sorted(path.name.removesuffix(".jsonl") for path in (directory / "rollouts").iterdir())


def test_each_step_writes_a_file_with_every_response(run, tmp_path):
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
    result = rows_of(tmp_path, 1)
    assert len(result) == 4
    assert [row["ground_truth"] for row in result] == [ANSWERS[row["prompt"]] for row in result]
    assert len({row["prompt"] for row in result}) == 2


def test_right_answers_without_a_json_type_are_written_as_text(run, tmp_path, capsys):
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


def test_table_is_printed_at_its_interval_with_best_responses_first(run, capsys):
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
def test_table_covers_best_to_worst_responses(capsys, count):
    rows = [{"prompt": "p", "response": f"answer{i}", "reward": float(i), "rewards": {}} for i in range(count)]
    RolloutLog(table_rows=3)._print_table(rows, 1)
    shown = capsys.readouterr().out
    assert f"answer{count - 1}" in shown
    assert "answer0" in shown


def test_trial_run_leaves_no_files(run, tmp_path):
    run(callbacks=[RolloutLog(table_every_n_steps=1)], trainer={"fast_dev_run": 1}).fit()
    assert not (tmp_path / "rollouts").exists()


def test_long_text_is_cut_in_the_middle():
    assert _short(" " + "x" * 300) == "x" * 300
    cut = _short("a" * 400 + "b" * 400)
    assert cut.startswith("a" * 150 + " ... ")
    assert cut.endswith(" ... " + "b" * 150)


def test_token_values_are_written_up_to_their_limit(run, tmp_path):
    log = RolloutLog(max_token_values=10)
    instance = run(texts=["a", "ab", "gfed"], loop={"group_size": 2}, data={"shuffle": False}, callbacks=[log]).fit()
    rows = rows_of(tmp_path, 2)  # responses of 2, 3, 4 and 2 tokens, end tokens included
    assert [row["response_tokens"] for row in rows] == [2, 3, 4, 2]
    assert [len(row.get("tokens", {"ids": []})["ids"]) for row in rows] == [2, 3, 0, 2]  # the worst that fit
    values = rows[1]["tokens"]
    assert values["texts"] == ["a", "b", "</s>"]
    assert {len(column) for column in values.values()} == {3}
    experience = instance.module.last_step.experience
    for name, expected in (
        ("logprob", experience.old_logprobs),
        ("rollout_logprob", experience.rollout.rollout_logprobs),
        ("entropy", experience.entropies),
        ("advantage", experience.advantages),
        ("weight", experience.weights),
    ):
        assert values[name] == pytest.approx(expected[1, :3].tolist(), abs=1e-4)
    assert "ref_logprob" not in values  # the run has no reference
    assert values["ids"] == experience.rollout.response_ids[1, :3].tolist()
    assert min(values["entropy"]) > 0
    assert values["version"] == [1, 1, 1]
    assert values["sampled"] == values["in_loss"] == [True, True, True]


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ([3000] * 64, 2048, [32] * 64),
        ([10, 3000, 20, 3000], 2048, [10, 1009, 20, 1009]),
        ([3, 4, 5], 12, [3, 4, 5]),
        ([3, 4, 5], 2048, [3, 4, 5]),
        ([3000] * 6, 60, [20, 0, 0, 0, 20, 20]),  # best, worst, second
        ([3000] * 6, 20, [10, 0, 0, 0, 0, 10]),
        ([3000] * 6, 1, [1, 0, 0, 0, 0, 0]),
        ([3000] * 6, 0, [0] * 6),
        ([], 100, []),
    ],
)
def test_first_tokens_of_long_responses_have_values(lengths, most, expected):
    rewards = {6: [3.0, 0.5, 0.4, 0.3, 2.0, 0.0]}.get(len(lengths), [0.0] * len(lengths))
    assert value_counts(lengths, rewards, most) == expected
    assert sum(expected) <= most


def test_responses_without_a_reward_are_last_to_have_values():
    assert value_counts([3000] * 4, [math.nan, 1.0, math.nan, 0.0], 40) == [0, 20, 0, 20]


def test_step_of_long_responses_has_values_for_each(run, tmp_path):
    texts = ["abcdefgabcdefgabcdefgabcdefg"] * 2
    loop = {"group_size": 2, "max_response_tokens": 28}
    run(texts=texts, loop=loop, callbacks=[RolloutLog(max_token_values=72)]).fit()
    rows = rows_of(tmp_path, 1)
    assert {row["response_tokens"] for row in rows} == {28}
    assert [len(row["tokens"]["ids"]) for row in rows] == [18] * 4
    assert {len(values) for row in rows for values in row["tokens"].values()} == {18}


def test_advantage_length_and_end_of_a_response_are_written(run, tmp_path):
    instance = run(
        texts=["a", "ab", "gfed"], loop={"group_size": 2}, data={"shuffle": False}, callbacks=[RolloutLog()]
    ).fit()
    rows = rows_of(tmp_path, 2)
    assert [row["stop"] for row in rows] == ["stop", "stop", "length", "stop"]
    assert [row["response_tokens"] for row in rows] == [2, 3, 4, 2]
    experience = instance.module.last_step.experience
    for i, row in enumerate(rows):
        length = row["response_tokens"]
        assert row["advantage"] == pytest.approx(float(experience.advantages[i, :length].mean()), abs=1e-6)


def test_response_without_a_token_in_the_loss_has_no_advantage(run, tmp_path):
    sampling = DynamicSampling(prompts_per_step=4)
    judge = RewardFunction(lambda completions: [0.0] * len(completions), name="judge")
    loop = {"rewards": [judge], "group_size": 2, "dynamic_sampling": sampling}
    run(loop=loop, data={"batch_size": 4}, callbacks=[RolloutLog()]).fit()
    assert {row["advantage"] for row in rows_of(tmp_path, 1)} == {None}


def test_reward_that_does_not_apply_is_null(run, tmp_path):
    judge = RewardFunction(lambda completions: [None, 1.0] * (len(completions) // 2), name="judge")
    run(loop={"rewards": [judge]}, data={"val": InMemory(ROWS)}, callbacks=[RolloutLog()]).fit()
    assert [row["rewards"]["judge"] for row in rows_of(tmp_path, 1)] == [None, 1.0]
    assert None in [row["reward"] for row in rows_of(tmp_path, 0, "validation")]


def test_turns_and_ends_of_conversations_are_written(run, tmp_path):
    settings = EnvironmentSettings(worlds.Guess, bridge="plain", max_turns=2, timeout_s=None)
    loop = {"rewards": [], "environment": settings, "group_size": 8, "max_response_tokens": 9}
    data = {"val": InMemory(ROWS * 4), "shuffle": False}
    run(texts=["a", "b", "c", "d", "e"], loop=loop, data=data, callbacks=[RolloutLog()]).fit()
    for rows in (rows_of(tmp_path, 1), rows_of(tmp_path, 2, "validation")):
        assert {row["stop"] for row in rows} == {"done", "max_turns"}
        for row in rows:
            turns = sum(part["from"] == "policy" for part in row["segments"]) if "segments" in row else 1
            assert row["turns"] == turns
            assert row["tool_calls"] == 0
            assert (row["stop"] == "done") == (row["reward"] > 0.5)


def test_each_validation_writes_a_file_with_its_greedy_responses(run, tmp_path):
    data = {"val": InMemory(ROWS), "val_batch_size": 3}
    instance = run(texts=["a", "gfedc"], data=data, callbacks=[RolloutLog()]).fit()
    assert files_of(tmp_path) == ["step-000001", "step-000002", "validation-000000", "validation-000002"]
    rows = rows_of(tmp_path, 2, "validation")
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    for row, sample in zip(rows, instance.loop.validation_samples, strict=True):
        assert [row[name] for name in ("prompt", "response", "ground_truth")] == [
            sample[name] for name in ("prompt", "response", "ground_truth")
        ]
        assert row["rewards"] == {"exact": sample["exact"]}
        assert row["reward"] == sample["exact"]
        assert row["stop"] == ("length" if row["response_tokens"] == 4 else "stop")
    assert [row["prompt"] for row in rows] == ["a", "bb", "ccc", "d"]


def test_score_is_the_reward_without_reward_functions(run, tmp_path):
    model, data = {"reward_model": TinyModel(seed=5)}, {"val": InMemory(ROWS)}
    run(loop={"rewards": []}, model=model, data=data, callbacks=[RolloutLog()]).fit()
    rows = rows_of(tmp_path, 0, "validation")
    assert len({row["reward"] for row in rows}) > 1
    assert all(row["rewards"] == {"score": row["reward"]} for row in [*rows, *rows_of(tmp_path, 1)])


class FollowsInStep2(Callback):
    """Lets the strategy be that of a rank which splits the model with the first one, during the callbacks of step 2."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 2:
            self.monkeypatch.setattr(type(pl_module.role_strategy), "is_group_leader", False)

    def on_validation_end(self, trainer, pl_module):
        self.on_train_batch_end(trainer, pl_module)


def test_ranks_with_the_same_responses_write_them_once(run, tmp_path, monkeypatch):
    callbacks = [FollowsInStep2(monkeypatch), RolloutLog()]
    run(data={"val": InMemory(ROWS)}, trainer={"max_steps": 2}, callbacks=callbacks).fit()
    assert files_of(tmp_path) == ["step-000001", "validation-000000"]


@pytest.mark.slow
def test_resumed_run_removes_files_of_steps_after_the_checkpoint(run, tmp_path):
    def start(steps):
        trainer = {"max_epochs": 4, "max_steps": steps}
        return run(data={"val": InMemory(ROWS)}, trainer=trainer, callbacks=[RolloutLog()])

    first = start(2).fit()
    first.trainer.save_checkpoint(tmp_path / "x.ckpt")
    start(6).fit()
    (tmp_path / "rollouts/step-000006-rank1.jsonl").write_text("")
    (tmp_path / "rollouts/notes.jsonl").write_text("")
    assert "validation-000006" in files_of(tmp_path)
    start(3).fit(ckpt_path=tmp_path / "x.ckpt")
    steps = [f"step-{step:06d}" for step in (1, 2, 3)]
    validations = [f"validation-{step:06d}" for step in (0, 2, 3)]
    assert files_of(tmp_path) == ["notes", *steps, *validations]


def test_new_run_removes_files_of_an_earlier_one(run, tmp_path):
    run(data={"val": InMemory(ROWS)}, callbacks=[RolloutLog()]).fit()
    run(trainer={"max_steps": 1}, callbacks=[RolloutLog()]).fit()
    assert files_of(tmp_path) == ["step-000001"]


def test_validate_command_writes_no_file(run, tmp_path):
    instance = run(data={"val": InMemory(ROWS)}, callbacks=[RolloutLog()])
    instance.trainer.validate(instance.module, datamodule=instance.data)
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_run_without_a_reference_has_no_kl(run, tmp_path, coef):
    instance = run(
        model={"kl_loss": KLTerm(coef, "k3"), "kl_reward": KLTerm(0.0, "k1")}, callbacks=[RolloutLog()]
    ).fit()
    assert instance.module.has_ref == bool(coef)
    rows = rows_of(tmp_path, instance.trainer.global_step)
    assert {row["kl"] is None for row in rows} == {not coef}
    assert {"ref_logprob" in row["tokens"] for row in rows} == {bool(coef)}
    if coef:
        expected = instance.module.last_step.experience.ref_logprobs[0, : rows[0]["response_tokens"]].tolist()
        assert rows[0]["tokens"]["ref_logprob"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "instance"),
    [
        (["Example: 1\n2+3", "Example: 1\n2+4"], ["... 2+3", "... 2+4"]),
        (["Example: 1\n2+3"] * 2, ["Example: 1\n2+3"] * 2),
        (["Example: 1\n2+3", "Test: 1\n2+3"], ["Example: 1", "Test: 1"]),
        (["2+3", "2+4"], ["2+3", "2+4"]),
        (["one"], ["one"]),
        (["user\n2+3\nassistant\n", "user\n20+4\nassistant\n"], ["... 2+3", "... 20+4"]),
        (["a\nb", "a\nb\nb"], ["... b", "... b\nb"]),
    ],
)
def test_common_prefix_of_prompts_is_omitted(prompts, instance):
    assert own_parts(prompts) == instance
