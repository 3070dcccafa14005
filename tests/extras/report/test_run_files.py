"""Files of a run as data of its page: texts, invalid and foreign files, checks that ran, definitions, validations."""

import json
import os

import pytest

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.health.monitor import CHECKS, HealthMonitor
from lightning_rlhf.extras.report import command as report
from lightning_rlhf.extras.report.check_states import _NEEDS, check_states
from lightning_rlhf.extras.report.page import report_page, run_data, shortened
from lightning_rlhf.extras.report.run_directory import RunDirectory, read_responses
from tests.extras.health.test_health_checks import CASES, WEIGHTS, steps
from tests.extras.report.test_report_page import RESPONSES, ROWS


def data_of(folder, live=False):
    (data,) = run_data([RunDirectory(folder)], live)
    return json.loads(json.dumps(data, allow_nan=False))


def page_data(folder):
    page = report_page([RunDirectory(folder)])
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


# -- texts ------------------------------------------------------------------------------------------------------------


def test_long_texts_are_cut_in_the_middle_with_a_mark(run_directory):
    whole, long = "a" * 20_000, "b" * 20_000 + "c" * 15_906
    row = {**RESPONSES[0], "prompt": whole, "response": long, "segments": [{"from": "policy", "text": long}]}
    (sample,) = data_of(run_directory("a", ROWS, {1: [row]}))["samples"][0]["rows"]
    assert sample["prompt"] == whole
    assert "prompt_left_out" not in sample
    mark = "\n… 15,906 characters left out, see lightning-rlhf inspect …\n"
    assert sample["response"] == "b" * 10_000 + mark + "c" * 10_000
    assert sample["response_left_out"] == 15_906
    assert sample["segments"][0]["text"] == sample["response"]
    assert sample["segments"][0]["text_left_out"] == 15_906


def test_text_at_the_limit_is_not_cut():
    assert shortened("a", "x" * 20_000) == {"a": "x" * 20_000}
    assert shortened("a", "x" * 20_001)["a_left_out"] == 1


def test_samples_have_the_numbers_of_their_responses(run_directory):
    extra = {"advantage": None, "response_tokens": 7, "turns": 2, "tool_calls": 1, "stop": "max_turns"}
    (sample,) = data_of(run_directory("a", ROWS, {1: [{**RESPONSES[0], **extra}]}))["samples"][0]["rows"]
    assert {name: sample[name] for name in extra} == extra


def test_runs_with_equal_directory_names_get_different_labels(run_directory):
    folders = [run_directory(name, ROWS) for name in ("sweep/a/seed1", "sweep/b/seed1", "sweep/b/seed2")]
    runs = [RunDirectory(folder) for folder in folders]
    assert [run["name"] for run in run_data(runs[1:])] == ["seed1", "seed2"]
    assert [run["name"] for run in run_data(runs)] == ["a/seed1", "b/seed1", "b/seed2"]
    assert [run["name"] for run in run_data(runs[:1] * 2)] == ["seed1", "seed1"]


# -- strange files ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_other_files_next_to_the_responses_are_ignored(run_directory, tmp_path):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    before = data_of(folder)
    rollouts = folder / "rollouts"
    for name in ("step-abc.jsonl", "step-²³.jsonl", "step-1.jsonl", "step-000002.jsonl.swp", "step--00001.jsonl", "x"):
        (rollouts / name).write_text(json.dumps(RESPONSES[0]))
    (rollouts / "step-000003.jsonl").mkdir()
    os.mkfifo(rollouts / "step-000004.jsonl")
    os.mkfifo(folder / "end.json")
    (tmp_path / "secret.jsonl").write_text(json.dumps({"response": "secret"}))
    (rollouts / "step-000005.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (rollouts / "step-000006.jsonl").symlink_to(tmp_path / "missing")
    assert data_of(folder) == before
    assert RunDirectory(folder).rollouts(5) == []


def test_links_within_a_run_are_read(run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    (folder / "rollouts/step-000002.jsonl").symlink_to(folder / "rollouts/step-000001.jsonl")
    assert len(RunDirectory(folder).rollouts(2)) == len(RESPONSES)


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "health_settings.json", "rollouts"])
def test_links_out_of_a_run_are_not_read(run_directory, name):
    folder = run_directory("a", ROWS, {1: RESPONSES}, {"k": "secret"}, {"k": "secret"})
    (folder / "health_settings.json").write_text('{"rewards": ["secret"]}')
    other = folder.with_name("other")
    (folder / name).rename(other)
    (folder / name).symlink_to(other)
    data = data_of(folder)
    known = {
        "config.yaml": data["config"],
        "env.json": data["environment"],
        "health_settings.json": [check["note"] for check in data["checks"] if "secret" in check["note"]],
        "rollouts": data["samples"],
    }
    assert not known[name]


def test_metrics_file_that_links_out_of_the_directory_is_rejected(run_directory):
    folder = run_directory("a", ROWS)
    (folder / "metrics.csv").rename(folder.with_name("metrics.csv"))
    (folder / "metrics.csv").symlink_to(folder.with_name("metrics.csv"))
    with pytest.raises(UsageError, match=r"metrics\.csv is a link out of its directory, which is not followed"):
        RunDirectory(folder)


def deep(levels):
    return '{"response": ' + "[" * levels + "]" * levels + "}\n"


@pytest.mark.parametrize("line", [deep(100), deep(900), deep(100_000), "1\n", "[]\n", "\xff\n", "9" * 5000 + "\n"])
def test_damaged_lines_are_ignored(run_directory, line):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    with (folder / "rollouts/step-000001.jsonl").open("ab") as file:
        file.write(line.encode("latin-1"))
    assert len(RunDirectory(folder).rollouts(1)) == len(RESPONSES)
    assert report_page([RunDirectory(folder)])


WRONG = [None, "NaN", "1", {}, {"a": [1]}, [], [[1]], True, -1, 1e308, 10**400]


@pytest.mark.parametrize("name", [*RESPONSES[0], "rewards", "segments", "images", "ground_truth", "stop", "turns"])
def test_wrong_values_of_responses_end_no_page(run_directory, name):
    rows = [{**RESPONSES[0], name: value} for value in WRONG]
    run = RunDirectory(run_directory("a", ROWS, {1: [*RESPONSES, *rows]}))
    assert len(run.rollouts(1)) == len(RESPONSES) + len(rows)
    assert all(isinstance(row.get("reward", 0), int | float | None) for row in run.rollouts(1))
    assert report_page([run])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("env.json", deep(100_000)),
        ("env.json", deep(900)),
        ("end.json", deep(100)),
        ("config.yaml", "a: " + "[" * 2000),
        ("config.yaml", "a: &a [*a, [1]]"),
        ("metrics.csv", "step,a\n1,\0\n"),
    ],
)
def test_damaged_files_raise_a_one_line_error(run_directory, capsys, name, content):
    folder = run_directory("a", ROWS)
    (folder / name).write_text(content)
    assert report.run([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lightning-rlhf: {folder / name} cannot be read, the file is damaged: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "rollouts/step-000001.jsonl", "metrics.csv"])
def test_files_without_permission_raise_a_one_line_error(run_directory, capsys, monkeypatch, name):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    opened = type(folder).open

    def denied(path, *arguments, **options):
        if path == folder / name:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(type(folder), "open", denied)
    assert report.run([str(folder)]) == 2
    assert capsys.readouterr().err == f"lightning-rlhf: {folder / name} cannot be read: Permission denied\n"


def test_trailing_missing_values_of_tokens_are_omitted(tmp_path):
    hidden = {"response": ', "tokens": {"ids": [1]}}', "reward": 1.0}
    rows = [
        {"response": "a", "reward": 1.0, "tokens": {"ids": [1], "texts": ["a"]}},
        {**hidden, "tokens": {"ids": [1, 2], "texts": ["a", "b"]}},
        hidden,
        {"ground_truth": {"x": 1, "tokens": {"ids": [1]}}, "reward": 2.0},
        {"tokens": {"ids": [1]}, "reward": 3.0},
        {"a": 1, "tokens": {"ids": [1]}, "reward": 3.0},
    ]
    path = tmp_path / "step-000001.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_responses([path]) == rows
    plain = read_responses([path], tokens=False)
    assert plain == [{"response": "a", "reward": 1.0}, hidden, *rows[2:]]


# -- checks -----------------------------------------------------------------------------------------------------------


def states_of(rows, rewards=(), skipped=(), weights=WEIGHTS):
    bounds = {"val/pair_accuracy": 0.95, "val/policy_order": 0.98}
    monitor = HealthMonitor(rewards, skipped, bounds, weights)
    pairs = [(int(row.get("step", i + 1)), {k: v for k, v in row.items() if k != "step"}) for i, row in enumerate(rows)]
    for step, row in pairs:
        monitor.add(step, row)
    states = check_states(pairs, monitor.findings, rewards, skipped, bounds, weights)
    assert [state["name"] for state in states] == list(CHECKS)
    return {state["name"]: (state["state"], state["note"]) for state in states}


def test_every_check_lists_the_metrics_it_needs():
    assert _NEEDS.keys() == CHECKS.keys() - {"constant reward"}


@pytest.mark.parametrize("name", CASES)
def test_check_has_failed_passed_or_had_no_data(name):
    fails, step, *_, passes = CASES[name]
    assert states_of(fails, ["a"])[name] == ("failed", f"step {step}")
    state, note = states_of(passes, ["a"])[name]
    assert state == "passed"
    assert note
    others = [*steps(9, other__metric=1.0), {"val/other": 1.0}]
    state, note = states_of(others, ["a"])[name]
    assert state == "no data"
    assert note.endswith((" is not logged", " is not logged: set val_metric of RolloutLoop"))
    assert states_of(fails, ["a"], [name])[name][0] == "not applicable"


def test_a_check_whose_metric_is_within_its_bound_again_has_recovered():
    fails, step, *_ = CASES["constant reward"]
    later = [*fails, *steps(2, reward__a=0.5, reward__a_std=0.25)]
    state, note = states_of(later, ["a"])["constant reward"]
    assert (state, note) == ("recovered", f"failed at step {step}; reward/a_std is 0.25 now")
    fails, step, *_ = CASES["truncation"]
    state, note = states_of([*fails, *steps(1, rollout__truncated_fraction=0.0)], ["a"])["truncation"]
    assert (state, note) == ("recovered", f"failed at step {step}; rollout/truncated_fraction is 0 now")
    assert states_of([*fails, *steps(1, rollout__truncated_fraction=0.9)], ["a"])["truncation"][0] == "failed"


@pytest.mark.parametrize("name", [name for name in CASES if _NEEDS.get(name) is None or _NEEDS[name].steps > 2])
def test_check_that_needs_more_steps_is_too_early(name):
    passes = CASES[name][-1]
    needed = 3 if name == "constant reward" else _NEEDS[name].steps
    unit = "validations" if name == "over-optimisation" else "steps"
    shown = [row for row in passes if any(key.startswith("val/") for key in row)] if unit == "validations" else passes
    assert states_of(shown[: needed - 1], ["a"])[name] == ("too early", f"{needed - 1} of {needed} {unit}")
    assert states_of(shown[:needed], ["a"])[name][0] == "passed"


@pytest.mark.parametrize(("weights", "state"), [({}, False), ({"a": 1.0}, False), ({"a": 0.0}, True), (WEIGHTS, True)])
def test_check_of_a_second_reward_applies_to_runs_that_have_one(weights, state):
    rows = CASES["second reward"][-1]
    assert (states_of(rows, ["a"], weights=weights)["second reward"][0] != "not applicable") is state


def test_check_of_a_run_without_steps_is_too_early():
    result = states_of([{"step": 0, "val/fraction_correct_greedy": 0.5}], ["a"])
    assert {state for state, _ in result.values()} == {"too early"}
    assert result["KL to the reference"] == ("too early", "0 of 1 steps")
    assert result["over-optimisation"] == ("too early", "1 of 3 validations")


def test_validations_of_the_only_reward_are_checked():
    names = ("val/a_sampled", "val/a_sampled_low", "val/a_sampled_high")
    rows = [dict.fromkeys(names, 0.5)] * 3
    result = states_of(rows, ["a"])
    assert result["over-optimisation"] == ("passed", "val/a_sampled 0.5")
    assert result["worse validation"] == ("passed", "val/a_sampled_low 0.5")
    assert result["worse validation"] == states_of(rows[:2], ["a"])["worse validation"]
    assert states_of([*rows, *steps(1, other=1.0)], ["a", "b"])["worse validation"][0] == "no data"


def test_critic_check_is_skipped_for_nearly_constant_rewards():
    rows = steps(22, value__explained_variance=-0.5, reward__std=lambda i: 1.0 if i < 10 else 0.06)
    note = "value/explained_variance -0.5, but rewards vary less than half as much as at the start"
    assert states_of(rows)["critic"] == ("not applicable", note)
    assert states_of(steps(22, value__explained_variance=0.5, reward__std=0.1))["critic"][1].endswith(" 0.5")


def test_page_has_the_checks_of_the_run(run_directory):
    folder = run_directory("a", ROWS)
    (folder / "health_settings.json").write_text('{"rewards": [], "skipped": ["clipping"], "bounds": {}}')
    result = {check["name"]: check["state"] for check in data_of(folder)["checks"]}
    assert result["constant reward"] == result["clipping"] == result["reward model"] == "not applicable"
    assert result["KL to the reference"] == "passed"
    assert result["critic"] == "no data"
    assert result["over-optimisation"] == "too early"


# -- definitions and validations --------------------------------------------------------------------------------------


def test_page_defines_the_metrics_of_its_runs(run_directory):
    result = page_data(run_directory("a", [{**row, "mine": 1.0} for row in ROWS]))["definitions"]
    assert result["kl/ref"] == {
        "unit": "nats per response",
        "meaning": "KL to the reference by k1 (log p - log q of the sampled tokens), before the update; per response, "
        "so that it grows with its length",
    }
    assert result["val/fraction_correct_greedy"]["unit"] == "fraction"
    assert "mine" not in result
    assert "step" not in result


def test_validation_metrics_without_the_prefix_get_it_on_the_page(run_directory):
    rows = [
        *ROWS[:3],
        {"step": 2, "val/fraction_correct_greedy": 0.5, "mine": 2.0, "fraction_correct_greedy": 3.0},
        {"step": 3, "mine": 4.0, "validation": 1},
    ]
    data = data_of(run_directory("a", rows))
    assert data["validation"] == {
        "step": [0, 2, 3], "val/fraction_correct_greedy": [0.25, 0.5, None], "val/mine": [None, 2.0, 4.0]
    }  # fmt: skip
    assert "mine" not in data["training"]


def answer(index, text="x", **more):
    return {"index": index, "prompt": f"p{index}", "response": text, "reward": 1.0, "rewards": {"a": 1.0}, **more}


def write_validation(folder, step, rows, rank=""):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"rollouts/validation-{step:06d}{rank}.jsonl").write_text(text)


def test_answers_to_the_same_prompts_are_from_the_first_and_last_validation(run_directory):
    folder = run_directory("a", ROWS)
    write_validation(folder, 0, [answer(i, "before") for i in range(0, 40, 2)], "-rank0")
    write_validation(folder, 0, [answer(i, "before") for i in range(1, 40, 2)], "-rank1")
    write_validation(folder, 5, [answer(i) for i in range(40)])
    write_validation(folder, 10, [answer(i, "after", stop="length") for i in range(39, 2, -1)] + [{"index": "x"}, {}])
    data = data_of(folder)
    assert data["validations"] == [0, 5, 10]
    first, last = data["answers"]
    assert (first["step"], last["step"]) == (0, 10)
    assert [row["index"] for row in first["rows"]] == [row["index"] for row in last["rows"]] == list(range(3, 15))
    assert {row["response"] for row in first["rows"]} == {"before"}
    assert {(row["response"], row["stop"]) for row in last["rows"]} == {("after", "length")}
    live = data_of(folder, live=True)
    assert live["validations"] == [0, 5, 10]
    assert "answers" not in live


def test_one_validation_and_no_validation(run_directory):
    folder = run_directory("a", ROWS)
    assert (data_of(folder)["validations"], data_of(folder)["answers"]) == ([], [])
    write_validation(folder, 10, [answer(0)])
    assert [item["step"] for item in data_of(folder)["answers"]] == [10]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        ("Interrupted: by SIGTERM", "interrupted"),
        ("KeyboardInterrupt", "interrupted"),
        ("ValueError: x", "failed"),
        (None, "ended"),
    ],
)
def test_interrupted_run_does_not_count_as_failed(run_directory, error, state):
    directory = run_directory("a", ROWS)
    (directory / "end.json").write_text(json.dumps({"error": error}))
    assert RunDirectory(directory).state()["state"] == state
