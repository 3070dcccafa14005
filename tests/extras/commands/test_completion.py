"""The script of ``lightning-rlhf completion`` in bash."""

import re
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from lightning_rlhf.cli.commands import COMMANDS
from lightning_rlhf.extras.commands import check_data, completion
from lightning_rlhf.extras.plan import command as plan

# Calls the function that the script registers, as bash does when the tab key is pressed after the last word.
CALL = """
source "$1"
shift
function=$(complete -p lightning-rlhf | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
"$function" "$1" "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The path of the completion script for bash."""
    path = tmp_path_factory.mktemp("completion") / "bash"
    with path.open("w") as file, redirect_stdout(file):
        assert completion.run(["bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", COMMANDS.keys()),
        ("ge", ["generate"]),
        ("fit --conf", ["--config"]),
        ("fit --config dat", ["data.yaml"]),
        ("fit --config data.yaml --trainer.max_", [f"--trainer.max_{name}" for name in ("epochs", "steps", "time")]),
        ("fit --model.init_args.minib", ["--model.init_args.minibatch_size"]),
        ("fit --data.init_args.batch", ["--data.init_args.batch_size"]),
        ("fit --rollout.gro", ["--rollout.group_size"]),
        ("fit --model GRP", ["GRPOModule"]),
        ("check", ["check-data"]),
        ("check-data --js", ["--json"]),
        ("plan --gp", ["--gpu", "--gpus", "--gpu-memory-gib"]),
        ("generate --engine v", ["vllm"]),
        ("inspect ru", ["runs"]),
        ("completion z", ["zsh"]),
    ],
)
def test_bash_completes_commands_and_options(script, tmp_path, line, expected):
    (tmp_path / "runs").mkdir()
    (tmp_path / "data.yaml").touch()
    words = ["lightning-rlhf", *line.split(" ")]
    result = subprocess.run(["bash", "-c", CALL, "bash", script, *words], cwd=tmp_path, capture_output=True, text=True)
    assert not result.stderr
    assert set(result.stdout.split()) == set(expected)


@pytest.mark.parametrize(("name", "usage"), [("check-data", check_data._USAGE), ("plan", plan._USAGE)])
def test_completed_options_of_commands_with_a_configuration_equal_those_of_the_help(name, usage):
    commands = completion.all_commands()._subparsers._group_actions[0].choices
    command = commands[name]
    named = set(re.findall(r"^  (--[a-z-]+)", usage, re.MULTILINE))
    assert named
    assert named <= command._option_string_actions.keys()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell, capsys):
    assert completion.run([shell]) == 0
    assert "lightning-rlhf" in capsys.readouterr().out


def test_missing_shtab_is_reported_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert completion.run(["bash"]) == 2
    assert "pip install 'lightning-rlhf[completion]'" in capsys.readouterr().err
