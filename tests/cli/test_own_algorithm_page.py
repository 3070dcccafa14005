"""The code of docs/own_algorithm.md runs, and its estimator agrees with values computed by hand."""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rlhf.objectives.base import AdvantageInputs

PAGE = (Path(__file__).resolve().parents[2] / "docs/own_algorithm.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The importable files of the page."""
    (tmp_path / "my_algorithms.py").write_text("\n".join([BLOCKS[0], BLOCKS[2]]))
    (tmp_path / "losses.py").write_text(BLOCKS[1])
    (tmp_path / "my_module.py").write_text(BLOCKS[3])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_algorithms", "my_module"):
        sys.modules.pop(name, None)


def test_estimator_of_a_case_by_hand(written):
    from my_algorithms import MaxRL

    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    token_rewards = torch.stack([torch.zeros(6), rewards], dim=1)
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[3] = False  # no policy token: not a member
    inputs = AdvantageInputs(token_rewards, mask, torch.tensor([0, 0, 0, 0, 1, 1]))
    advantages, _ = MaxRL()(inputs)
    # group 0 has three members and a mean of 1/3: (1 - 1/3) / (1/3) = 2, (0 - 1/3) / (1/3) = -1
    assert advantages[:, 1].tolist() == pytest.approx([2.0, -1.0, -1.0, 0.0, 0.0, 0.0])


def test_documented_test_passes(written):
    (written / "test_own.py").write_text(BLOCKS[4])
    import test_own

    test_own.test_a_group_with_one_right_answer()
    sys.modules.pop("test_own")


def test_loss_of_a_case_by_hand(written):
    from my_algorithms import SquaredRatio

    logprobs = torch.tensor([[2.0]]).log()
    loss, metrics = SquaredRatio(strength=3.0)(
        logprobs, torch.zeros(1, 1), torch.tensor([[0.5]]), torch.tensor([[True]])
    )
    assert loss.item() == pytest.approx(-0.5 * 2 + 3 / 2)
    assert metrics["ratio_distance"].item() == pytest.approx(1.0)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", ["parts", "function", "function of a preset", "module"])
def test_run_with_estimator_and_loss(written, fit, config, form):
    settings = {"actor": config["model"]["init_args"]["actor"], "minibatch_size": 4}
    if form != "module":
        block, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
        model = yaml.safe_load(block)["model"]
        is_function = form.startswith("function")
        loss = "losses.py:plain_ratio" if is_function else {"class_path": "my_algorithms.SquaredRatio"}
        model["init_args"] |= settings | {"policy_loss": loss}
        if form == "function of a preset":
            model["class_path"] = "lightning_rlhf.RLOOModule"
            del model["init_args"]["advantages"]
    else:
        model = {"class_path": "my_module.MyModule", "init_args": {**settings, "strength": 0.5}}
    config["model"] = model
    config["trainer"]["callbacks"][0]["init_args"]["group_size"] = 2
    result = fit(config)
    assert (result.code, result.err) == (0, "")
    assert ("policy/ratio_distance" in next(written.rglob("metrics.csv")).read_text()) == (form in ("parts", "module"))
