"""Every example runs to its end and learns what it says."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# Lightning's own words at every run from Python; the command line turns them off.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:.*module\(s\) in eval mode"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


def run(name, *arguments):
    return runpy.run_path(str(EXAMPLES / name))["main"](*arguments)


def test_every_example_is_run_here():
    tested = {"01_ppo_from_python.py", "02_custom_reward.py", "03_new_algorithm.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_ppo_from_python_learns_to_write_the_letter(tmp_path):
    assert run("01_ppo_from_python.py", str(tmp_path)) > 0.9
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_a_custom_reward_is_called_with_columns_and_refused_without(capsys):
    assert run("02_custom_reward.py")[:2] == pytest.approx([1.0, 0.8])
    assert "did you mean 'answer'?" in capsys.readouterr().out


def test_a_new_algorithm_learns(tmp_path):
    assert run("03_new_algorithm.py", str(tmp_path)) > 0.85
