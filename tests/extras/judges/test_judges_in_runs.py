"""Judges in runs of the command line: configuration, metrics, columns, and answers that are kept."""

import csv
import json
import warnings
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_rlhf.extras.commands.run_config import parse_run_config
from lightning_rlhf.extras.judges.asking import Judge
from lightning_rlhf.extras.judges.endpoint import Endpoint
from lightning_rlhf.extras.judges.rubric import Criterion, Rubric, Scale
from lightning_rlhf.extras.judges.rubric_reward import RubricReward
from lightning_rlhf.rewards.function import RewardFunction
from tests.extras.judges.chat_stub import criterion_of, grade

RUBRIC = {
    "scale": {"lowest": 0, "highest": 3},
    "criteria": [
        {"name": "accuracy", "question": "Is it correct?", "weight": 3},
        {"name": "brevity", "question": "Is it short?"},
    ],
}
REWARD, RANKING = (
    f"lightning_rlhf.extras.judges.{name}" for name in ("rubric_reward.RubricReward", "ranking_reward.RankingReward")
)


def answers(text):
    """Return an answer that depends on the response in a question, and on its criterion."""
    if "Rank the responses" in text:
        return json.dumps({"ranking": ["R2", "R1"]})
    response = text.partition(" response\n")[2].partition("\n")[0]
    return grade(3 if criterion_of(text) == "Is it short?" else len(response) % 4)


def rewards(stub, **options):
    judge = {"endpoint": {"url": stub.url}, "model": "judge", "answers": "answers.jsonl"}
    judged = {"rubric": "rubric.yaml", "judges": [judge], **options}
    columns = [
        {
            "function": {"class_path": REWARD, "init_args": {**judged, "criterion": name}},
            "name": name,
            "weight": 0.0,
        }
        for name in ("accuracy", "brevity")
    ]
    return [{"function": {"class_path": REWARD, "init_args": judged}, "name": "rubric"}, *columns]


def loop_of(config):
    return config["trainer"]["callbacks"][0]["init_args"]


def written(directory):
    """Return the responses of all steps of a run."""
    files = sorted(Path(directory, "rollouts").glob("step-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def built(value):
    """Return the reward functions that the parser makes of parsed ones."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=list[RewardFunction])
    return parser.instantiate_classes(Namespace(x=value))["x"]


def test_yaml_command_line_and_python_give_the_same_reward(chat, config):
    warnings.simplefilter("ignore")  # of jsonargparse; pytest restores the filters
    stub = chat(answers)
    Path("rubric.yaml").write_text(yaml.safe_dump(RUBRIC))
    Path("run.yaml").write_text(yaml.safe_dump(config))
    text = json.dumps(rewards(stub, criterion="brevity")[:1])
    from_command_line = parse_run_config(["--config", "run.yaml", f"--trainer.callbacks.rewards={text}"])
    inline = rewards(stub, criterion="brevity", rubric=RUBRIC)[:1]
    loop_of(config)["rewards"] = inline
    Path("run.yaml").write_text(yaml.safe_dump(config))
    from_yaml = parse_run_config(["--config", "run.yaml"])
    criteria = [Criterion("accuracy", "Is it correct?", 3), Criterion("brevity", "Is it short?")]
    judge = Judge(Endpoint(stub.url), "judge", answers="answers.jsonl")
    expected = RubricReward(Rubric(criteria, scale=Scale(0, 3)), judge, "brevity")
    for parsed in (from_command_line, from_yaml):
        (function,) = built(loop_of(parsed)["rewards"])
        reward = function.target
        assert (reward.rubric, reward.when_spent) == (expected.rubric, expected.when_spent)
        assert reward.askers == expected.askers  # the same object, so judge, budget and answers are too


@pytest.mark.slow
def test_run_has_criteria_as_metrics_and_columns_and_a_second_one_asks_nothing(chat, config, fit):
    stub = chat(answers)
    Path("rubric.yaml").write_text(yaml.safe_dump(RUBRIC))
    loop_of(config)["rewards"] = rewards(stub)
    assert fit(config).code == 0
    asked = len(stub.bodies)
    rows = written("runs/tiny")
    assert len(rows) == 8
    for row in rows:
        grades = {"accuracy": len(row["response"]) % 4 / 3, "brevity": 1.0}
        assert row["rewards"] == pytest.approx(grades | {"rubric": (3 * grades["accuracy"] + 1) / 4}, abs=1e-6)
        assert row["reward"] == row["rewards"]["rubric"]
    with Path("runs/tiny/metrics.csv").open() as file:
        steps = [row for row in csv.DictReader(file) if row["reward/rubric"]]
    for step in steps:
        assert float(step["reward_rubric/accuracy"]) == pytest.approx(float(step["reward/accuracy"]))
        assert float(step["reward_rubric/brevity"]) == float(step["reward/brevity"]) == 1.0
    questions = {(row["prompt"], row["response"]) for row in rows}
    assert asked == 2 * len(questions) == len(Path("answers.jsonl").read_text().splitlines())
    config["trainer"]["default_root_dir"] = "runs/again"
    assert fit(config).code == 0
    assert len(stub.bodies) == asked
    first, second = (Path(f"runs/{name}/rollouts/step-000002.jsonl").read_text() for name in ("tiny", "again"))
    assert first == second


@pytest.mark.slow
def test_run_learns_from_rankings_of_groups(chat, config, fit):
    stub = chat(answers)
    judge = {"endpoint": {"url": stub.url}, "model": "judge"}
    ranking = {"class_path": RANKING, "init_args": {"judges": [judge], "orders": 1, "max_unranked": 0.5}}
    config["model"]["class_path"] = "lightning_rlhf.GRPOModule"
    loop_of(config)["rewards"] = [{"function": ranking, "name": "rank"}]
    loop_of(config)["group_size"] = 2
    ended = fit(config)
    assert ended.code == 0, ended.err
    rows = written("runs/tiny")
    groups = [sorted(row["reward"] for row in rows[i : i + 2]) for i in range(0, len(rows), 2)]
    assert all(group in ([0.0, 1.0], [0.5, 0.5]) for group in groups)
    assert [0.0, 1.0] in groups


def test_invalid_rubric_ends_a_run_in_one_line_before_a_model_loads(chat, config, fit):
    without_weight = {"criteria": [{"name": "a", "question": "b", "weight": 0}]}
    Path("rubric.yaml").write_text(yaml.safe_dump(without_weight))
    loop_of(config)["rewards"] = rewards(chat(answers))[:1]
    config["model"]["init_args"]["actor"] = "no/model"
    ended = fit(config)
    assert ended.code == 2
    (line,) = ended.err.strip().splitlines()
    assert "rubric.yaml: the weights of a rubric must have a positive sum, got 0: set the weight" in line
    assert ended.out == ""
