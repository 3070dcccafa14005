"""The command line starts several processes for a strategy name in the configuration."""

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from safetensors.torch import load_file

from lightning_rlhf.cli import main
from tests.cli.conftest import PPO, _elsewhere  # noqa: F401 (loggers are put back)
from tests.distributed.launch import ROOT

SNIPPETS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/strategies.md").read_text(), re.DOTALL)


def run(folder, strategy, devices):
    """Train two steps in a folder and return the output, the weights, and the metrics."""
    config = copy.deepcopy(PPO)
    config["model"]["init_args"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    config["trainer"] |= {"strategy": strategy, "devices": devices}
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]
    config["trainer"]["callbacks"].append({"class_path": "lightning_rlhf.callbacks.RunCheckpoint"})
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = folder / "runs/tiny"
    return done.stdout + done.stderr, load_file(left / "export/model.safetensors"), (left / "metrics.csv").read_text()


@pytest.mark.slow
def test_ddp_from_the_command_line_gives_the_results_of_one_process(tmp_path):
    printed, weights, metrics = run(tmp_path / "two", "ddp", 2)
    assert printed.count("step 1: ") == 1  # only one process prints
    assert printed.count("Rollouts by") == 1
    assert printed.count("RLHFDDPStrategy: 2 processes on 1 node\n") == 1
    assert "warning" not in printed.lower()
    _, alone, metrics_alone = run(tmp_path / "one", "auto", 1)
    assert weights.keys() == alone.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-5)
    assert metrics.splitlines()[0] == metrics_alone.splitlines()[0]


@pytest.mark.parametrize(
    "snippet", SNIPPETS, ids=["name", "class path", "replicas", "long texts", "offload of idle roles"]
)
def test_documented_strategies_are_valid(snippet, tmp_path, capsys, monkeypatch):
    """Every snippet of the documentation is merged into the configuration of a run."""
    inputs = yaml.safe_load(snippet)["trainer"]
    config = copy.deepcopy(PPO)
    config["trainer"] |= inputs
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setattr("sys.argv", ["lightning-rlhf"])
    with pytest.raises(SystemExit) as end:
        main.run(["fit", "--config", str(path), "--print_config"])
    assert end.value.code == 0
    understood = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert understood["devices"] == inputs["devices"]
    strategy = inputs["strategy"]
    if isinstance(strategy, str):
        assert understood["strategy"] == strategy
        assert strategy in StrategyRegistry
    else:
        assert strategy["init_args"].items() <= understood["strategy"]["init_args"].items()


@pytest.mark.slow
def test_strategy_with_arguments_runs_from_its_class_path(tmp_path):
    documented = yaml.safe_load(SNIPPETS[1])["trainer"]["strategy"]
    documented["init_args"]["tensor_parallel_size"] = 1  # the model here has one head
    run(tmp_path / "two", documented, 2)


@pytest.mark.slow
def test_mistake_found_by_every_rank_gives_one_line_and_code_2(tmp_path):
    config = copy.deepcopy(PPO)
    config["trainer"] |= {"strategy": "ddp", "devices": 2}
    config["model"]["init_args"]["minibatch_size"] = 3
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("lightning-rlhf: minibatch_size 3 does not divide the 4 responses of a step")
