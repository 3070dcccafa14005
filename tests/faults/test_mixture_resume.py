"""A mixture with given responses that is killed and resumed gives bitwise the results of the uninterrupted run."""

import json

import pytest

from tests.faults.runs import assert_same, output, ppo, rows

pytestmark = pytest.mark.slow
OBJECTIVES = "lightning_rlhf.extras.algorithms.mixture."


def mixture(directory, max_staleness):
    """Return 12 steps on rows of three sources: rewards, a teacher, demonstrations."""
    sources = ("sums", "taught", "shown")
    lines = [
        {"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1), "completion": str(2 * n + 1), "source": sources[n % 3]}
        for n in range(24)
    ]
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = ppo(max_staleness=max_staleness)
    options = config["model"]["init_args"]
    teacher = {**options["actor"], "init_args": {**options["actor"]["init_args"], "seed": 3}}
    config["model"] = {
        "class_path": "lightning_rlhf.MixtureModule",
        "init_args": {
            **{name: options[name] for name in ("actor", "optimizer", "lr_scheduler", "update_epochs")},
            **({"correction": options["correction"]} if max_staleness else {}),
            "minibatch_size": 4,
            "divergence": {"beta": 0.5, "top_k": 4},
            "mixture": {
                "sums": {"class_path": f"{OBJECTIVES}RewardObjective"},
                "taught": {"class_path": f"{OBJECTIVES}TeacherObjective", "init_args": {"teacher": teacher}},
                "shown": {"class_path": f"{OBJECTIVES}SupervisedObjective", "init_args": {"weight": 0.5}},
            },
        },
    }
    data = config["data"]["init_args"]
    data |= {"train": str(file), "val": str(file)}
    loop, *others = config["trainer"]["callbacks"]
    loop["init_args"]["given_responses"] = {"on_policy": {"shown": 0.0, "taught": 0.5}}
    config["trainer"]["callbacks"] = [loop, *(each for each in others if "KLControl" not in each["class_path"])]
    return config


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_kills_change_no_result(forge, tmp_path, max_staleness):
    config = mixture(tmp_path, max_staleness)
    assert forge.attempt(tmp_path / "whole", config) == 0, output(tmp_path / "whole")[-4000:]
    table = [dict(row) for row in rows(tmp_path / "whole")]
    losses = {name: [row[f"mixture/{name}/loss"] for row in table] for name in ("sums", "shown")}
    assert all(len(set(values)) > 6 for values in losses.values())
    deaths = [
        {"position": ("lightning_rlhf.modules.role_module:RoleModule.update", 10, "before")},
        {"position": ("lightning_rlhf.rollout.source:RolloutSource.request", 3, "after")},
    ]
    assert forge.finish(tmp_path / "killed", config, deaths) == len(deaths)
    assert_same(tmp_path / "killed", tmp_path / "whole")
