"""Classes in files next to the configuration are found, and only classes of the right kind are called."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_rlhf import __main__
from lightning_rlhf.cli.config_files import check_classes
from lightning_rlhf.cli.errors import CLIError
from lightning_rlhf.extras.commands.run_config import make_module, parse_run_config

OWN = """
import torch
from lightning.pytorch import Callback

from lightning_rlhf import PPOModule


class Greeting(Callback):
    def on_train_start(self, trainer, pl_module):
        print("a callback of a file beside the configuration")


class OwnModule(PPOModule):
    pass


def nothing(completions):
    return [0.0 for _ in completions]
"""


@pytest.fixture(autouse=True)
def _import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["configuration", "working directory"])
def test_class_in_the_working_directory_or_next_to_the_configuration_is_found(
    cli, config, tmp_path, monkeypatch, beside
):
    name = f"own_classes_{beside[:4]}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path if beside == "configuration" else elsewhere
    (folder / f"{name}.py").write_text(OWN)
    config["model"]["class_path"] = f"{name}.OwnModule"
    config["trainer"]["callbacks"].append({"class_path": f"{name}.Greeting"})
    rewards = config["trainer"]["callbacks"][0]["init_args"]["rewards"]
    rewards.append({"function": f"{name}.py:nothing"})
    rewards.append({"function": f"{name}.py:nothing", "name": "in_a_process", "timeout_s": 30.0, "on_error": "skip"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(elsewhere)
    result = cli("fit", "--config", "../run.yaml")
    assert result.code == 0, result.err
    assert "a callback of a file beside the configuration" in result.out
    assert "OwnModule: actor" in result.out
    metrics = Path("runs/tiny/metrics.csv").read_text()
    assert "reward/nothing" in metrics
    assert "reward/in_a_process" in metrics


def test_local_file_does_not_shadow_an_installed_package(fit, config, tmp_path):
    Path("yaml.py").write_text("raise ValueError('not this one')")
    assert fit(config).code == 0
    assert sys.path[-1] == str(tmp_path)


SHELL = {"class_path": "os.system", "init_args": {"command": "touch ran"}}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("key", ["optimizer", "lr_scheduler", "critic_optimizer"])
def test_function_as_optimizer_or_schedule_is_not_called(cli, config, key):
    config["model"]["init_args"][key] = SHELL
    Path("run.yaml").write_text(yaml.safe_dump(config))
    result = cli("fit", "--config", "run.yaml")
    assert result.code == 2
    message = f"model.{key}: class_path must name a class, got 'os.system', a builtin_function_or_method"
    assert result.err == f"lightning-rlhf: {message}\n"
    with pytest.raises(CLIError, match=message.removeprefix("model.")):
        make_module(parse_run_config(["--config", "run.yaml"]))
    assert not Path("ran").exists()


def test_class_of_the_wrong_kind_is_not_called(fit, config):
    config["model"]["init_args"]["optimizer"] = {
        "class_path": "subprocess.Popen",
        "init_args": {"args": "touch ran", "shell": True},
    }
    result = fit(config)
    assert result.code == 2
    assert "Expected 'subprocess.Popen' to be a subclass of" in result.err
    assert not Path("ran").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plan_reads_a_correction_built_by_a_class_method(config, monkeypatch, capsys):
    correction = "lightning_rlhf.extras.algorithms.verl_corrections.VerlCorrection.bypass_ppo_clip"
    config["model"]["init_args"]["correction"] = {"class_path": correction}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["lightning-rlhf", "plan", "--config", "run.yaml", "--gpus", "1"])
    assert not __main__.main()
    assert "a step: " in capsys.readouterr().out


def test_class_method_with_another_return_type_is_not_called():
    with pytest.raises(ValueError, match="x: class_path must name a class, got 'pathlib\\.Path\\.cwd'"):
        check_classes({"x": {"class_path": "pathlib.Path.cwd"}})


def test_exponentially_nested_aliases_are_rejected_immediately(fit):
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 10)]
    result = fit("\n".join(["l0: &l0 [1, 2, 3, 4, 5, 6, 7, 8, 9]", *levels]))
    assert result.code == 2
    assert "values after its aliases are expanded, allowed: 100000" in result.err


@pytest.mark.slow
def test_help_works_for_the_short_name_of_a_class():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf", "fit", "--model.help", "GRPOModule"],
        cwd=root, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--model.kl_loss.coef" in done.stdout
