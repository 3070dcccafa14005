"""``new --recipe`` writes the configurations of the repository, with the runs that come before each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_rlhf.cli.merging import merged_settings
from lightning_rlhf.extras.commands import new
from lightning_rlhf.extras.commands.recipes import recipes
from lightning_rlhf.extras.schema.check import mistakes
from lightning_rlhf.extras.schema.known import find


def written(directory, name, *options):
    """Write a recipe and return the arguments of its commands."""
    assert new.run([str(directory), "--recipe", name, *options]) == 0
    text = (directory / "README.md").read_text()
    return [line.split()[2:] for line in text.splitlines() if line.startswith("lightning-rlhf fit ")]


@pytest.mark.parametrize("name", recipes())
def test_each_recipe_is_complete(tmp_path, monkeypatch, name):
    commands = written(tmp_path / "run", name)
    monkeypatch.chdir(tmp_path / "run")
    made = {"runs/images/model"}
    for arguments in commands:
        settings = merged_settings(arguments, find).values
        models = set(re.findall(r"runs/[\w./-]+(?=/export|\b)", yaml.safe_dump(settings["model"])))
        assert {model.removesuffix("/export") for model in models} <= made, arguments
        found = [message for message in mistakes(arguments, "") if "no model at" not in message]
        assert found == []
        made.add(settings["trainer"]["default_root_dir"])
    assert len(made) == len(commands) + 1


def test_list_with_a_word_shows_what_is_about_it(capsys):
    assert new.run(["--list", "GSPO"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert "algorithms/gspo" in names
    assert len(names) < 10


def test_listed_recipes_have_their_model_and_hardware(capsys):
    assert new.run(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(recipes()) + 2
    (small,) = [line for line in lines if "one_gpu/grpo_0.5b " in line]
    assert small.endswith("(Qwen/Qwen2.5-0.5B-Instruct, 1 GPU of 24 GiB)")
    assert all(len(line) < 220 for line in lines)


def test_model_of_the_hub_can_be_another_one(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    (arguments,) = written(tmp_path / "run", "one_gpu/grpo_0.5b", "--model", "mine")
    text = (tmp_path / "run" / arguments[1]).read_text()
    assert text.count(f"{tmp_path}/mine") == 2
    assert "Qwen/" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--recipe", "simpo"], "there is no recipe 'simpo'; did you mean 'preferences/simpo'?"),
        (["a", "--recipe", "what"], "there is no recipe 'what'; --list lists them"),
        (
            ["a", "--recipe", "lora/grpo", "--kind", "sft"],
            "--kind, --recipe, --from-trl and --from-verl cannot be combined: keep one of them",
        ),
        (["a", "--recipe", "lora/grpo", "--model", "x/y"], "the recipe lora/grpo makes its own model: remove --model"),
        ([], "new needs the name of a new directory: lightning-rlhf new DIR; --list lists the recipes"),
        (
            ["a", "--kind", "gspo"],
            f"--kind must be one of {', '.join(new.KINDS)}, got 'gspo'; a recipe has the name: "
            "--recipe algorithms/gspo",
        ),
        (
            ["a", "--kind", "reward"],
            f"--kind must be one of {', '.join(new.KINDS)}, got 'reward'; a recipe has the name: "
            "--recipe hh_rlhf/reward",
        ),
        (["--list", "nothing_of_it"], "no recipe is about 'nothing_of_it'; new --list without a word lists all"),
        (["a", "--model", "/no/such"], "no model at '/no/such': looked at /no/such"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert new.run(arguments) == 2
    assert capsys.readouterr().err == f"lightning-rlhf: {message}\n"
    assert not Path("a").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_of_a_recipe_run_one_after_the_other(tmp_path):
    commands = written(tmp_path / "run", "preferences/simpo")
    for arguments in commands:
        command = [sys.executable, "-m", "lightning_rlhf", "fit", *arguments, "--trainer.max_steps", "2"]
        done = subprocess.run(command, cwd=tmp_path / "run", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/runs/preferences/simpo/export/model.safetensors").is_file()
