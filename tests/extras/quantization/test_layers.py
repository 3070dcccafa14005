"""Quantized frozen layers: values against bitsandbytes and a loop, gradients, loading, merging, sharing."""

import json
import subprocess
import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_rlhf import FromConfig, PPOModule, Pretrained
from lightning_rlhf.extras.quantization.layers import QuantizedLinear, quantize
from lightning_rlhf.models.lora import LoRA, is_adapter, merged_weights
from lightning_rlhf.models.tensors import count_parameters
from tests.distributed.test_vision_language import write_checkpoint
from tests.models.architectures import tiny
from tests.models.test_lora import GPT2, IDS, INDEX, logprobs, randomize_adapters
from tests.stand_ins import TINY_LLAMA

KINDS = pytest.mark.parametrize("kind", ["nf4", "int8"])
LORA = LoRA(4, 8)
NF4 = [  # QLoRA, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


@pytest.fixture
def base(tmp_path):
    """The directory of a base model."""
    FromConfig(TINY_LLAMA, seed=0).causal().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def layer(rows=48, columns=96, bias=True, seed=3):
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias=bias)


def test_nf4_values_are_those_of_a_loop():
    """A block is divided by its largest size; each number becomes the nearest of 16."""
    plain = layer(bias=False)
    made = QuantizedLinear(plain, "nf4").dequantized()
    blocks = plain.weight.detach().double().view(-1, 64)
    for ours, block in zip(made.double().view(-1, 64), blocks, strict=True):
        scale = block.abs().max()
        nearest = [min(NF4, key=lambda c: abs(c - float(x / scale))) for x in block]
        expected = torch.tensor(nearest, dtype=torch.float64) * scale
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=1e-9)  # the scales are stored in 8 bits


def test_values_equal_those_of_bitsandbytes_layers():
    plain = layer(rows=64, columns=128)
    states = torch.randn(5, 128)
    theirs = bitsandbytes.nn.Linear4bit(128, 64, quant_type="nf4", compute_dtype=torch.float32)
    theirs.weight = bitsandbytes.nn.Params4bit(plain.weight.detach().clone(), quant_type="nf4")
    theirs.bias = plain.bias
    theirs = theirs.to("cpu").train()
    torch.testing.assert_close(QuantizedLinear(plain, "nf4")(states), theirs(states), atol=1e-6, rtol=0)
    stored, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(plain.weight.detach().half())
    whole = bitsandbytes.functional.int8_vectorwise_dequant(stored, scale)
    expected = nn.functional.linear(states, whole, plain.bias)
    torch.testing.assert_close(QuantizedLinear(plain, "int8")(states), expected, atol=1e-6, rtol=0)


@KINDS
def test_gradient_of_states_is_that_of_the_dequantized_layer(kind):
    made = QuantizedLinear(layer(), kind)
    states = torch.randn(2, 3, 96, requires_grad=True)
    weights = torch.randn(2, 3, 48)
    (made(states) * weights).sum().backward()
    other = states.detach().clone().requires_grad_()
    (nn.functional.linear(other, made.dequantized(), made.bias) * weights).sum().backward()
    torch.testing.assert_close(states.grad, other.grad, atol=1e-6, rtol=0)
    assert made.weight.grad is None


@KINDS
def test_memory_of_the_weight(kind):
    made = QuantizedLinear(layer(1024, 1024, bias=False), kind)
    stored = sum(t.numel() * t.element_size() for t in (*made.parameters(), *made.buffers()))
    assert stored / 1024**2 < {"nf4": 0.518, "int8": 1.005}[kind]  # bytes per weight


@KINDS
def test_autocast_computes_in_its_dtype(kind):
    made = QuantizedLinear(layer(), kind)
    with torch.autocast("cpu", torch.bfloat16):
        result = made(torch.randn(4, 96))
    assert result.dtype == torch.bfloat16


def test_numbers_of_other_dtypes_and_of_a_copy_on_another_device_stay():
    made = QuantizedLinear(layer().bfloat16(), "nf4")
    assert made.dequantized().dtype == torch.bfloat16
    assert torch.equal(made.dequantized(torch.float32).bfloat16(), made.dequantized())
    assert made.to(torch.float32).weight.dtype == torch.uint8


# -- models -----------------------------------------------------------------------------------------------------------


@KINDS
def test_loaded_model_computes_what_its_dequantized_weights_compute(kind, base, tmp_path):
    model = randomize_adapters(Pretrained(base, lora=LORA, quantization=kind).causal())
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14
    assert all(p.requires_grad == is_adapter(name) for name, p in model.lm.named_parameters())
    model.save_pretrained(tmp_path / "merged")
    again = Pretrained(str(tmp_path / "merged")).causal()
    torch.testing.assert_close(logprobs(again), logprobs(model), atol=1e-5, rtol=0)
    assert (logprobs(Pretrained(base).causal()) - logprobs(model, adapters=False)).abs().max() > 1e-4
    logprobs(model).sum().backward()
    assert all((p.grad is not None) == is_adapter(name) for name, p in model.lm.named_parameters())


def test_merged_weights_are_base_and_adapter(base):
    model = randomize_adapters(Pretrained(base, lora=LORA, quantization="nf4").causal())
    name = "model.layers.1.mlp.up_proj"
    adapted = model.lm.get_submodule(name)
    product = adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    expected = adapted.base_layer.dequantized() + 2 * product
    torch.testing.assert_close(merged_weights(model.lm)[f"{name}.weight"], expected)


@KINDS
def test_file_of_a_quantized_model_is_not_mapped_after_loading(base, kind):
    model = Pretrained(base, quantization=kind).causal()
    mapped = Path("/proc/self/maps").read_text()
    assert f"{base}/model.safetensors" not in mapped
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in model.parameters())


def test_four_roles_share_quantized_weights(base):
    save_file({"v_head.summary.weight": torch.ones(1, 32)}, Path(base) / "value_head.safetensors")
    source = Pretrained(base, lora=LORA, quantization="nf4")
    module = PPOModule(source, critic=source, reward_model=Pretrained(base, quantization="nf4"))
    module.configure_model()
    weights = [
        {m.weight.data_ptr() for m in role.modules() if isinstance(m, QuantizedLinear)}
        for role in (module.actor, module.critic, module.reward_model)
    ]
    assert weights[0] == weights[1] == weights[2]
    assert torch.equal(module.critic(IDS, INDEX), source.scalar()(IDS, INDEX))
    counts = module.parameter_counts()
    plain = sum(parameter.numel() for parameter in Pretrained(base, lora=LORA).causal().parameters())
    assert counts["actor"] == plain == count_parameters(module.actor)
    assert module.parameter_counts(trained=True)["actor"] < counts["actor"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_text_model_of_a_vision_language_model_is_quantized_and_its_towers_are_not(kind, tmp_path):
    directory = tmp_path / kind
    directory.mkdir()
    write_checkpoint(kind, directory)
    source = Pretrained(str(directory), lora=LORA, quantization="nf4")
    model = randomize_adapters(source.causal())
    quantized = {name for name, module in model.lm.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(quantized) == 7 * model.lm.config.get_text_config().num_hidden_layers
    assert all("language_model" in name for name in quantized)
    logprobs(model).sum().backward()
    trained = {name for name, parameter in model.lm.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.lm.named_parameters() if is_adapter(name)}
    model.save_pretrained(tmp_path / "merged")
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == len(quantized)
    assert torch.allclose(logprobs(Pretrained(str(tmp_path / "merged")).causal()), logprobs(model), atol=1e-5)


# -- what cannot be quantized -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [GPT2, tiny("mixtral")], ids=["gpt2", "mixtral"])
def test_models_without_linear_layers_are_rejected(architecture):
    lm = FromConfig(architecture, seed=0).causal().lm
    with pytest.raises(
        ValueError, match=r"most weights of .* are not in linear layers of torch, such as stacked experts"
    ):
        quantize(lm, "nf4")


def test_settings_that_contradict_are_rejected(base, monkeypatch):
    with pytest.raises(ValueError, match=r"^quantization must be nf4, int8 or null, got 'fp4'$"):
        Pretrained(base, quantization="fp4")
    with pytest.raises(
        ValueError, match=r"^lora: dora needs the lengths of unquantized rows: remove dora or quantization$"
    ):
        Pretrained(base, lora=LoRA(1, 1, dora=True), quantization="nf4")


def test_missing_package_is_named(base, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"quantization needs bitsandbytes, .* 'lightning-rlhf\[quantization\]'"
    ):
        Pretrained(base, quantization="nf4")


def test_model_that_is_stored_quantized_is_rejected(base):
    file = Path(base, "config.json")
    config = json.loads(file.read_text()) | {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
    }
    file.write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"are stored quantized, which is not read: use the model that they were made from"
    ):
        Pretrained(base).causal()


@pytest.mark.slow
def test_kernels_of_the_hub_are_not_loaded():
    """bitsandbytes would download and run code if the package kernels is installed."""
    code = """
import importlib.machinery, sys, types
asked = []
fake = types.ModuleType("kernels")
fake.__spec__ = importlib.machinery.ModuleSpec("kernels", None)
fake.get_kernel = lambda *names, **options: asked.append(names)
sys.modules["kernels"] = fake
import lightning_rlhf.models.loading
import bitsandbytes.optim
assert sys.modules["kernels"] is fake
print("asked", asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "asked []", done.stderr
    assert "kernels" not in done.stderr
