"""The LoRA configuration runs and agrees with docs/lora.md."""

import re

import pytest
import yaml

from lightning_rlhf.callbacks import HFExport, RolloutLoop
from lightning_rlhf.cli.main import RLHFCLI
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.rollout.vllm.engine import VLLMAdapterEngine
from tests.cli.conftest import LLAMA
from tests.cli.test_algorithm_configs import ROOT, contains, tiny

PATH = ROOT / "configs/lora/grpo.yaml"
PAGE = (ROOT / "docs/lora.md").read_text()
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
MODEL = BLOCKS[0]
(ENGINE,), EXPORT = (block for block in BLOCKS if isinstance(block, list))


def small():
    """Return the configuration with a small random actor and no engine process."""
    config = tiny(PATH)
    actor = {"architecture": LLAMA, "lora": {"rank": 16, "alpha": 32}}
    config["model"]["init_args"]["actor"]["init_args"] = actor
    return config


@pytest.mark.slow
def test_step_with_the_configuration_passes_without_messages(fit):
    result = fit(small(), "--trainer.fast_dev_run", "1")
    assert (result.code, result.err, result.warned) == (0, "", [])


def test_page_agrees_with_the_configuration():
    assert contains(MODEL, yaml.safe_load(PATH.read_text()))
    assert "lightning-rlhf fit --config configs/lora/grpo.yaml" in PAGE


def test_documented_options_of_engine_and_export_are_valid(cli, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    made = []
    monkeypatch.setattr(RLHFCLI, "shown_command", "export")
    monkeypatch.setattr(RLHFCLI, "_run_subcommand", lambda self, subcommand: made.append(self))
    config = yaml.safe_load(PATH.read_text())
    config["trainer"]["callbacks"][0]["init_args"]["engine"] = ENGINE["init_args"]["engine"]
    config["trainer"]["callbacks"] += EXPORT
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert cli("fit", "--config", str(tmp_path / "config.yaml")).code == 0
    assert made[0].model.sources["actor"].lora == LoRA(rank=16, alpha=32)
    assert "ref" not in made[0].model.sources
    callbacks = made[0].trainer.callbacks
    (loop,) = (callback for callback in callbacks if isinstance(callback, RolloutLoop))
    assert isinstance(loop.engine, VLLMAdapterEngine)
    assert [callback.adapter for callback in callbacks if isinstance(callback, HFExport)] == [True]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("lora", "output"),
    [
        ({"rank": 0, "alpha": 8}, "rank must be at least 1, got 0"),
        (
            {"rank": 4, "alpha": 8, "target_modules": ["query"]},
            "lora: target_modules query not found among the linear layers of LlamaForCausalLM",
        ),
    ],
)
def test_invalid_lora_options_give_a_one_line_error(fit, lora, output):
    config = small()
    config["model"]["init_args"]["actor"]["init_args"]["lora"] = lora
    result = fit(config, "--trainer.fast_dev_run", "1")
    assert result.code == 2
    assert output in result.err
    assert "Traceback" not in result.err
