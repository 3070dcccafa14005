"""Mistakes in settings of adapters and quantization end ``fit`` with a one-line message before weights are read."""

import importlib.util
import json
import shutil

import pytest

from lightning_rlhf import FromConfig, Pretrained
from lightning_rlhf.models.directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.cli.conftest import LLAMA
from tests.models.architectures import tiny
from tests.models.test_adapter_files import foreign

LORA = {"rank": 4, "alpha": 8}
DORA = LORA | {"dora": True}
ENGINE = {"class_path": "lightning_rlhf.rollout.vllm.engine.VLLMAdapterEngine"}
# Source of the actor beside its path, other settings by their names, and a part of the message.
MISTAKES = {
    "no adapter there": ({"adapter": "models/nowhere"}, {}, "no adapter at 'models/nowhere'"),
    "a model as adapter": ({"adapter": "models/base"}, {}, "contains a whole model: set it as path, not as adapter"),
    "adapter of another width": ({"adapter": "models/wide"}, {}, "does not fit the model 'models/base'"),
    "adapter of another architecture": ({"adapter": "models/of_gpt2"}, {}, "target_modules c_attn not found"),
    "rank of the configuration": ({"adapter": "models/rank"}, {}, "3 x 32 in the adapter and 5 x 32 in the model"),
    "another kind of adapter": ({"adapter": "models/ia3"}, {}, "has peft_type IA3: only LoRA"),
    "trained head": ({"adapter": "models/head"}, {}, "which is not supported: merge it into its base model"),
    "damaged adapter": ({"adapter": "models/damaged"}, {}, "adapter_model.safetensors is damaged"),
    "lora beside adapter": ({"adapter": "models/adapter", "lora": LORA}, {}, "remove lora beside adapter"),
    "rank of 0": ({"lora": LORA | {"rank": 0}}, {}, "rank must be at least 1, got 0"),
    "misspelt layer": ({"lora": LORA | {"target_modules": ["q_porj"]}}, {}, "target_modules q_porj not found"),
    "nothing left": ({"lora": LORA | {"exclude_modules": ["model"]}}, {}, "exclude_modules"),
    "dropout of 1": ({"lora": LORA | {"dropout": 1.0}}, {}, "dropout must be at least 0 and below 1, got 1.0"),
    "dropout in RL": ({"lora": LORA | {"dropout": 0.1}}, {}, "which must come from the same network: set dropout to 0"),
    "another kind of numbers": ({"quantization": "fp4", "lora": LORA}, {}, "nf4"),
    "trained quantized weights": ({"quantization": "nf4"}, {}, "are stored in nf4 and cannot be trained"),
    "quantized critic": (
        {},
        {"critic": {"path": "models/base", "quantization": "int8"}},
        "the critic's weights are stored in int8 and cannot be trained",
    ),
    "stored quantized": (
        {"path": "models/awq", "lora": LORA},
        {},
        "are stored quantized, which is not read: use the model that they were made from",
    ),
    "stacked experts": (
        {"path": "models/experts", "quantization": "nf4", "lora": LORA},
        {},
        "are not in linear layers of torch, such as stacked experts",
    ),
    "lengths of quantized rows": ({"quantization": "nf4", "lora": DORA}, {}, "remove dora or quantization"),
    "adapters of a reference": (
        {},
        {"ref": {"path": "models/base", "lora": LORA}, "kl_loss": {"coef": 0.1}},
        "the ref is not trained, so its source cannot have lora",
    ),
    "engine of adapters without one": ({}, {"engine": ENGINE}, "but the actor has none: set lora in its source"),
    "engine of adapters and DoRA": ({"lora": DORA}, {"engine": ENGINE}, "vLLM does not support DoRA's vectors"),
    "rank above the engine's": ({"lora": LORA | {"rank": 600}}, {"engine": ENGINE}, "supports adapters up to rank 512"),
    "quantized shards": (
        {"quantization": "nf4", "lora": LORA},
        {"strategy": "rlhf_fsdp"},
        "shards weights, but it cannot shard weights in nf4, as the actor's are",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with models, and with adapters that do not fit them."""
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in {
        "base": LLAMA,
        "wider": LLAMA | {"hidden_size": 64},
        "gpt2": tiny("gpt2"),
        "experts": tiny("mixtral"),
    }.items():
        FromConfig(architecture, seed=0).causal().save_pretrained(folder / name)
    foreign(str(folder / "base"), folder / "adapter")
    foreign(str(folder / "wider"), folder / "wide")
    foreign(str(folder / "gpt2"), folder / "of_gpt2", target_modules=["c_attn"], fan_in_fan_out=True)
    foreign(str(folder / "base"), folder / "head", modules_to_save=["lm_head"])
    for name, change in {"rank": {"r": 5}, "ia3": {"peft_type": "IA3"}, "damaged": {}}.items():
        file = shutil.copytree(folder / "adapter", folder / name) / ADAPTER_CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (folder / "damaged" / ADAPTER_WEIGHTS).write_bytes(b"damaged")
    file = shutil.copytree(folder / "base", folder / "awq") / "config.json"
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    return folder


def changed(config, options, others):
    """Return a configuration with a source of the actor, and with further settings by their names."""
    options = {"path": "models/base"} | options
    arguments = config["model"]["init_args"]
    arguments["actor"] = {"class_path": "lightning_rlhf.Pretrained", "init_args": options}
    for name, value in others.items():
        if name == "engine":
            config["trainer"]["callbacks"][0]["init_args"][name] = value
        elif name == "strategy":
            config["trainer"][name] = value
        elif name == "kl_loss":
            arguments[name] = value
        else:
            arguments[name] = {"class_path": "lightning_rlhf.Pretrained", "init_args": value}
    return config


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_message_before_weights_are_read(fit, config, models, tmp_path, monkeypatch, mistake):
    options, others, message = MISTAKES[mistake]
    (tmp_path / "models").symlink_to(models)
    monkeypatch.setattr(Pretrained, "_read", lambda *_: pytest.fail("weights were read"))
    result = fit(changed(config, options, others))
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert len(result.err.strip().splitlines()) == 1, result.err


@pytest.mark.parametrize(("package", "options"), [
    ("peft", {"lora": LORA}), ("bitsandbytes", {"lora": LORA, "quantization": "nf4"}),
])  # fmt: skip
def test_missing_package_is_named_before_weights_are_read(fit, config, models, tmp_path, monkeypatch, package, options):
    (tmp_path / "models").symlink_to(models)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    monkeypatch.setattr(Pretrained, "_read", lambda *_: pytest.fail("weights were read"))
    result = fit(changed(config, options, {}))
    assert result.code == 2
    assert f"needs {package}, which is not installed" in result.err
