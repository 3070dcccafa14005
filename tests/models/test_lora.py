"""LoRA adapters: trained parameters, merging, and the model with disabled adapters."""

import copy
import importlib.util
import json
from dataclasses import replace

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.lora import (
    MAGNITUDE,
    LoRA,
    adapter_settings,
    adapters_disabled,
    check_adapters,
    is_adapter,
    merged,
)
from tests.models.architectures import tiny
from tests.stand_ins import TINY_LLAMA

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 3, 4]])
INDEX = torch.arange(4).expand(2, -1)
GPT2 = {
    "model_type": "gpt2", "vocab_size": 11, "n_embd": 32, "n_layer": 1, "n_head": 1, "n_positions": 16,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ARCHITECTURES = pytest.mark.parametrize(
    "architecture", [TINY_LLAMA, TINY_LLAMA | {"tie_word_embeddings": True}, GPT2], ids=["untied", "tied", "gpt2"]
)


VARIANTS = pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"])


def source(architecture=TINY_LLAMA, lora=None, **options):
    return FromConfig(architecture, seed=0, lora=lora or LoRA(rank=4, alpha=8), **options)


def randomize_adapters(model):
    """Set the adapters of a model, whose initial product is zero, to random numbers, and return the model."""
    draw = torch.Generator().manual_seed(5)
    for name, parameter in model.lm.named_parameters():
        if name.endswith(MAGNITUDE):
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=draw)
        elif is_adapter(name):
            parameter.data.normal_(std=0.3, generator=draw)
    return model


def logprobs(model, **options):
    return model(IDS, INDEX, IDS[:, 1:], torch.ones(2, 4, dtype=torch.bool), **options).logprobs


def parameters_of(lm):
    return {name: parameter.detach() for name, parameter in lm.named_parameters()}


def equal(ours, theirs):
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- trained parameters ------------------------------------------------------------------------------------------------


def test_every_linear_layer_of_the_blocks_gets_an_adapter_and_only_adapters_are_trained():
    model = source().causal()
    names = {name for name, parameter in model.lm.named_parameters() if parameter.requires_grad}
    assert len(names) == 2 * len(LINEAR) * 2  # layers, matrices of an adapter
    assert all(is_adapter(name) for name in names)
    assert {name.split(".")[4] for name in names} == set(LINEAR)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "kind", ["mamba", "bamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h", "jamba", "granitemoehybrid"]
)
def test_adapters_of_mamba_are_only_where_the_layer_is_called(kind):
    model = FromConfig(tiny(kind), seed=0, lora=LoRA(4, 8)).causal().train()
    model.lm(input_ids=torch.randint(3, 11, (2, 8)), use_cache=False).logits.logsumexp(-1).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    assert not [name for name in gradients if "dt_proj" in name or "out_proj" in name]
    with pytest.raises(ValueError, match="target_modules out_proj not found among the linear layers of"):
        FromConfig(tiny(kind), lora=replace(LoRA(4, 8), target_modules=["out_proj"])).causal()


def test_layers_that_peft_rejects_are_one_line():
    with pytest.raises(
        UsageError, match=r"^lora: peft cannot adapt Zamba2ForCausalLM, set target_modules to other lay"
    ):
        FromConfig(tiny("zamba2"), lora=LoRA(4, 8)).causal()


def test_only_target_modules_get_an_adapter():
    model = source(lora=LoRA(2, 4, ["q_proj", "v_proj"])).causal()
    names = [name for name, parameter in model.lm.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[4] for name in names} == {"q_proj", "v_proj"}
    assert {tuple(model.lm.get_parameter(name).shape) for name in names} == {(2, 32), (32, 2)}


def test_head_of_a_scalar_model_is_trained_completely():
    model = source().scalar()
    names = {name for name, parameter in model.lm.named_parameters() if parameter.requires_grad}
    assert {name for name in names if not is_adapter(name)} == {"score.weight"}
    assert len(names) == 2 * len(LINEAR) * 2 + 1


def test_adapters_are_float32_next_to_weights_of_other_dtypes():
    model = source(dtype="bfloat16").causal()
    kinds = {is_adapter(name): parameter.dtype for name, parameter in model.lm.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def test_gradients_reach_every_adapter_and_no_weight():
    model = randomize_adapters(source().causal().train())
    logprobs(model).sum().backward()
    for name, parameter in model.lm.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) == is_adapter(name), name


# -- initial adapters -------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@VARIANTS
@ARCHITECTURES
def test_initial_model_equals_its_source_bitwise(architecture, options, dtype):
    adapted = source(architecture, LoRA(4, 8, **options), dtype=dtype)
    assert torch.equal(logprobs(adapted.causal()), logprobs(replace(adapted, lora=None).causal()))
    scores = [model_source.scalar()(IDS, INDEX) for model_source in (adapted, replace(adapted, lora=None))]
    assert torch.equal(*scores)


def test_initial_adapters_depend_only_on_the_run_seed(monkeypatch):
    def begin():
        return parameters_of(source().causal().lm)

    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    one = begin()
    torch.rand(5)
    state = torch.get_rng_state()
    assert equal(one, begin())
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    other = begin()
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    assert differ == {name for name in one if ".lora_A." in name}
    assert not any(one[name].any() for name in one if ".lora_B." in name)
    first, second = (one[f"model.layers.{layer}.self_attn.q_proj.lora_A.default.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


def test_actor_and_critic_of_one_source_have_different_initial_adapters():
    actor, critic = parameters_of(source().causal().lm), parameters_of(source().scalar().lm)
    assert not any(torch.equal(actor[name], critic[name]) for name in actor if ".lora_A." in name)


def test_meta_model_has_the_same_layout_as_a_loaded_one(tmp_path):
    """Ranks other than the first build on the meta device, and receive the weights of the loaded model."""
    source().causal().save_pretrained(tmp_path)
    for model_source in (source(dtype="bfloat16"), Pretrained(str(tmp_path), lora=LoRA(4, 8))):
        with torch.device("meta"):
            bare = parameters_of(model_source.causal().lm)
        loaded = parameters_of(model_source.causal().lm)
        assert {name: (t.shape, t.dtype) for name, t in bare.items()} == {
            name: (t.shape, t.dtype) for name, t in loaded.items()
        }
        assert all(tensor.is_meta for tensor in bare.values())


# -- switched off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@ARCHITECTURES
def test_trained_model_with_disabled_adapters_equals_its_source_bitwise(architecture, dtype):
    adapted = source(architecture, dtype=dtype)
    model, base = randomize_adapters(adapted.causal()), replace(adapted, lora=None).causal()
    with torch.no_grad():
        assert torch.equal(logprobs(model, adapters=False), logprobs(base))
        assert not torch.equal(logprobs(model), logprobs(base))


def test_adapters_are_enabled_again_after_errors_and_stay_trainable():
    model = randomize_adapters(source().causal())
    before = logprobs(model)
    with pytest.raises(KeyError), adapters_disabled(model):
        raise KeyError
    logprobs(model, adapters=False)
    assert torch.equal(logprobs(model), before)
    assert all(p.requires_grad == is_adapter(name) for name, p in model.lm.named_parameters())


def test_model_without_adapters_cannot_disable_them():
    model = replace(source(), lora=None).causal()
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapters to disable"):
        logprobs(model, adapters=False)


def test_peft_reads_the_switch_where_it_is_set():
    """Found in peft 0.21.2; if this fails, check the attributes that BaseTunerLayer.enable_adapters sets."""
    layer = next(module for module in source().causal().modules() if isinstance(module, LoraLayer))
    assert layer.disable_adapters is layer._disable_adapters is False
    layer.enable_adapters(False)
    assert layer._disable_adapters is True
    layer.enable_adapters(True)
    assert layer._disable_adapters is False


# -- merged -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft corrects it for GPT-2
@VARIANTS
@ARCHITECTURES
def test_merged_weights_equal_those_of_peft_under_the_names_of_the_base(architecture, options, dtype, tmp_path):
    adapted = source(architecture, LoRA(4, 8, **options), dtype=dtype)
    base, model = replace(adapted, lora=None).causal().lm, randomize_adapters(adapted.causal())
    before = {name: tensor.clone() for name, tensor in parameters_of(model.lm).items()}
    ours = {name: tensor.clone() for name, tensor in merged(model.lm, parameters_of(model.lm).items())}
    save_adapter(adapted.lora, {name: t for name, t in before.items() if is_adapter(name)}, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    if options == {"dora": True} and dtype == "bfloat16":  # peft rounds the lengths of rows as well
        for name, tensor in parameters_of(theirs).items():
            torch.testing.assert_close(ours[name], tensor, rtol=2**-6, atol=2**-9)
    else:
        assert equal(ours, parameters_of(theirs))
    assert list(ours) == list(parameters_of(base))
    assert not equal(ours, parameters_of(base))
    assert equal(parameters_of(model.lm), before)  # a merge changes nothing


@VARIANTS
def test_merged_model_computes_the_same_as_the_adapted_one(options, tmp_path):
    model = randomize_adapters(source(lora=LoRA(4, 8, **options)).causal())
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logprobs(Pretrained(str(tmp_path)).causal()), logprobs(model), atol=1e-5, rtol=0)


def test_merging_needs_one_tensor_at_a_time():
    model = randomize_adapters(source(TINY_LLAMA | {"attention_bias": True}).causal())
    expected = {name: tensor.clone() for name, tensor in merged(model.lm, parameters_of(model.lm).items())}
    assert any(name.endswith("q_proj.bias") for name in expected)

    def reused_memory():
        """Yield tensors that become invalid when the next one is requested."""
        memory = torch.empty(2000)
        for name, tensor in parameters_of(model.lm).items():
            yield name, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
            memory.fill_(torch.nan)

    result = {}
    for name, tensor in merged(model.lm, reused_memory()):
        result[name] = tensor.clone()
    assert equal(result, expected)


def test_model_without_adapters_is_passed_through_unchanged():
    lm = replace(source(), lora=None).causal().lm
    inputs = parameters_of(lm)
    assert all(tensor is inputs[name] for name, tensor in merged(lm, inputs.items()))


def test_scalar_models_are_saved_merged_with_their_head(tmp_path):
    model = randomize_adapters(source().scalar())
    model.lm.score.weight.data.fill_(0.5)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(Pretrained(str(tmp_path)).scalar()(IDS, INDEX), model(IDS, INDEX), atol=1e-5, rtol=0)


# -- as files ---------------------------------------------------------------------------------------------------------


def test_peft_loads_the_saved_adapter_onto_the_base(tmp_path):
    replace(source(), lora=None).causal().save_pretrained(tmp_path / "base")
    model = randomize_adapters(Pretrained(str(tmp_path / "base"), lora=LoRA(3, 12, ["q_proj", "down_proj"])).causal())
    weights = {name: tensor for name, tensor in parameters_of(model.lm).items() if is_adapter(name)}
    save_adapter(LoRA(3, 12, ["q_proj", "down_proj"]), weights, tmp_path / "adapter", str(tmp_path / "base"))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (3, 12, 0.0)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = torch.nn.functional.log_softmax(loaded(IDS).logits, -1)[:, :-1].gather(2, IDS[:, 1:, None])
        torch.testing.assert_close(logprobs(model), expected.squeeze(2), atol=1e-6, rtol=0)


def test_earlier_adapter_is_replaced_while_it_is_read(tmp_path):
    model = randomize_adapters(source().causal())
    weights = {name: tensor for name, tensor in parameters_of(model.lm).items() if is_adapter(name)}
    save_adapter(LoRA(4, 8), weights, tmp_path)
    read = load_file(tmp_path / "adapter_model.safetensors")
    saved = {name: tensor.clone() for name, tensor in read.items()}
    save_adapter(LoRA(4, 8), {name: tensor + 1 for name, tensor in weights.items()}, tmp_path)
    assert equal(read, saved)
    again = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(again[name], saved[name] + 1) for name in saved)


# -- rejected options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "lora: rank must be at least 1, got 0"),
        ((4, 0), "lora: alpha must be at least 1, got 0"),
        ((4, 8, []), "lora: target_modules is empty; leave it out to adapt all linear layers"),
    ],
)
def test_arguments_out_of_range_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        LoRA(*arguments)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "input_layernorm", "query"])
def test_modules_other_than_linear_layers_of_the_blocks_cannot_be_adapted(name):
    known = ", ".join(sorted(LINEAR))
    message = f"^lora: target_modules {name} not found among the linear layers of LlamaForCausalLM; available: {known}$"
    with pytest.raises(ValueError, match=message):
        source(lora=LoRA(4, 8, ["q_proj", name])).causal()


def test_misspelt_layer_is_reported_with_a_similar_one():
    with pytest.raises(ValueError, match="did you mean 'v_proj'\\? available: "):
        source(lora=LoRA(4, 8, ["v_porj"])).causal()


def test_model_without_linear_layers_is_rejected():
    lm = replace(source(), lora=None).causal().lm
    lm.model.layers = torch.nn.ModuleList()
    with pytest.raises(
        ValueError, match=r"^lora: LlamaForCausalLM has no linear layers to adapt; train it without lora$"
    ):
        LoRA(4, 8).add_to(lm)


def test_missing_peft_raises_a_one_line_error(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name))
    with pytest.raises(ModuleNotFoundError) as error:
        LoRA(4, 8)
    assert str(error.value) == "lora needs peft, which is not installed: pip install 'lightning-rlhf[peft]'"


def test_checkpoint_of_other_adapters_is_rejected():
    sources = {"actor": source(), "ref": replace(source(), lora=None)}
    stored = adapter_settings(sources)
    check_adapters(sources, stored)
    with pytest.raises(ValueError, match=r"written with lora \{'rank': 4, 'alpha': 8, .*this run has \{'rank': 4, 'al"):
        check_adapters({"actor": source(lora=LoRA(4, 16))}, stored)
    with pytest.raises(ValueError, match=r"^the checkpoint was written with lora null for the actor, but this run has"):
        check_adapters(sources, {})
    with pytest.raises(
        ValueError, match=r"for the actor, but this run has null: use the checkpoint's settings, or start a new"
    ):
        check_adapters({"actor": replace(source(), lora=None)}, stored)
