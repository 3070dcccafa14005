"""A resumed run reports settings changed since the checkpoint, and rejects those that would repeat or lose rows."""

import dataclasses
import shutil

import pytest

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.callbacks.loop.rollout_settings import RolloutSettings
from lightning_rlhf.callbacks.survival.run_settings import WHICH_ROWS, changes, rollout_settings
from lightning_rlhf.rollout.given_responses import GivenResponses
from tests.faults.runs import output, ppo

OTHER_DATA = "the checkpoint's position in the data would refer to other rows: some would be used twice"


def changed(**data):
    config = ppo(1, max_steps=2)
    config["data"]["init_args"] |= data
    return config


def with_loop(**arguments):
    config = ppo(1, max_steps=2)
    config["trainer"]["callbacks"][0]["init_args"] |= arguments
    return config


def with_model(**arguments):
    config = ppo(1, max_steps=2)
    config["model"]["init_args"] |= arguments
    return config


def with_seed(seed):
    return ppo(1, max_steps=2) | {"seed_everything": seed}


def problems(rows):
    return {"class_path": "lightning_rlhf.tasks.addition.Problems", "init_args": {"num_rows": rows}}


REJECTED = {
    "seed": (with_seed(8), "seed_everything is 8, was 7"),
    "half of the rows": (changed(train=problems(11)), "training rows is 11 with SHA-256"),
    "order": (changed(shuffle=False), "order of the data is shuffle: false, was shuffle: true"),
    "batch size": (changed(batch_size=2), "batch_size is 2, was 4"),
}
WARNED = {
    "temperature": (with_loop(temperature=0.5), "temperature is 0.5, was 1.0"),
    "response length": (with_loop(max_response_tokens=5), "max_response_tokens is 5, was 6"),
    "reward weight": (with_loop(rewards=[{"function": "tests.faults.runs.digits", "weight": 2.0}]), "weight 2, source"),
    "reward": (
        with_loop(rewards=[{"function": "tests.faults.test_run_settings.digits"}]),
        "reward digits is weight 1, source code ",
    ),
    "mini-batch": (with_model(minibatch_size=8), "minibatch_size is 8, was 4"),
    "KL coefficient": (with_model(kl_reward={"coef": 0.2}), "kl_reward is KLTerm(coef=0.2"),
    "reference": (
        with_model(ref={"class_path": "lightning_rlhf.FromConfig", "init_args": {"seed": 3}}),
        "source of the ref is",
    ),
}


def digits(completions):
    """Return a constant reward, as another function with the same name."""
    return [1.0] * len(completions)


@pytest.fixture(scope="module")
def begun(undisturbed):
    """A directory with a run of two steps, which tests copy."""
    return undisturbed(ppo(1, max_steps=2))


def resumed(forge, begun, directory, config):
    shutil.copytree(begun, directory, dirs_exist_ok=True)
    (directory / "output.log").unlink()
    config["trainer"]["max_steps"] = 3
    if isinstance(config["model"]["init_args"].get("ref"), dict):
        config["model"]["init_args"]["ref"]["init_args"]["architecture"] = config["model"]["init_args"]["actor"][
            "init_args"
        ]["architecture"]
    return forge.attempt(directory, config, resume="last"), output(directory)


@pytest.mark.slow
@pytest.mark.parametrize("change", [*REJECTED])
def test_changes_that_would_repeat_or_lose_rows_are_rejected(forge, begun, tmp_path, change):
    config, message = REJECTED[change]
    code, output = resumed(forge, begun, tmp_path, config)
    assert code == 2
    assert message in output.splitlines()[-1]
    assert OTHER_DATA in output.splitlines()[-1]
    assert "Traceback" not in output
    files, before = ({path.name: path.read_bytes() for path in (at / "run").glob("*.*")} for at in (tmp_path, begun))
    assert {"config.yaml", "end.json", "env.json", "report.html", "metrics.csv"} <= files.keys()
    assert files == before


@pytest.mark.slow
def test_changed_data_are_accepted_by_choice_with_one_line_each(forge, begun, tmp_path):
    config, message = REJECTED["batch size"]
    config["trainer"]["callbacks"].append(
        {"class_path": "lightning_rlhf.callbacks.RunState", "init_args": {"allow_other_data": True}}
    )
    code, output = resumed(forge, begun, tmp_path, config)
    assert code == 0, output[-2000:]
    assert f"Since the checkpoint: {message}." in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [name if name in ("temperature", "reward") else pytest.param(name, marks=pytest.mark.slow) for name in WARNED],
)
def test_other_changes_are_reported_in_one_line(forge, begun, tmp_path, change):
    config, message = WARNED[change]
    code, output = resumed(forge, begun, tmp_path, config)
    assert code == 0, output[-2000:]
    lines = [line for line in output.splitlines() if line.startswith("Since the checkpoint: ")]
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.slow
def test_previous_configuration_is_kept_and_an_unchanged_run_reports_nothing(forge, begun, tmp_path):
    before = (begun / "run/config.yaml").read_text()
    code, output = resumed(
        forge, begun, tmp_path / "more", ppo(1, max_steps=2)
    )  # one more step is another configuration
    assert code == 0
    assert "Since the checkpoint" not in output
    assert (tmp_path / "more/run/config-2.yaml").read_text() == before
    assert "max_steps: 3" in (tmp_path / "more/run/config.yaml").read_text()


def test_added_and_removed_settings_are_changes():
    then, now = {"a": "1", "b": "2"}, {"b": "2", "c": "3"}
    assert changes(then, now) == {"a": "a is absent, was 1", "c": "c is 3, was absent"}
    assert set(WHICH_ROWS) == {"seed_everything", "training rows", "order of the data", "batch_size"}


def test_every_option_that_changes_the_rollouts_is_compared():
    def prompt_of(prompts):
        return prompts

    loop = RolloutLoop([len], given_responses=GivenResponses("answer"), teacher_prompt=prompt_of, group_size=3)
    plain = RolloutLoop([len])
    compared, before = (rollout_settings([callback]) for callback in (loop, plain))
    assert set(changes(before, compared)) == {"given_responses", "teacher_prompt", "group_size"}
    assert "prompt_of, source code " in compared["teacher_prompt"]
    compared_fields = {field.name for field in dataclasses.fields(RolloutSettings)} & compared.keys()
    assert compared_fields >= {"dynamic_sampling", "max_staleness", "temperature", "stop_token_ids"}


def test_an_older_checkpoint_without_a_setting_is_one_where_it_had_no_value():
    assert changes({"a": "1"}, {"a": "1", "given_responses": "None"}) == {}
