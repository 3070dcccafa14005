"""Adapters that other programs wrote, and those that peft reads: settings, weights, and files that do not fit."""

import json
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_rlhf.models.adapter_files import load_adapter, read_lora, save_adapter
from lightning_rlhf.models.directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.lora import LoRA, is_adapter
from tests.models.test_lora import GPT2, IDS, INDEX, logprobs, parameters_of, randomize_adapters
from tests.stand_ins import TINY_LLAMA


@pytest.fixture
def base(tmp_path):
    """The directory of a base model."""
    FromConfig(TINY_LLAMA, seed=0).causal().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def foreign(base, directory, **settings):
    """Write an adapter with peft, as another program would, and return its model."""
    config = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 12, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | settings
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    draw = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(directory)
    return model.eval()


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["down_proj", "v_proj"], "use_dora": True, "lora_dropout": 0.1},
        {"target_modules": r".*\.(up|k)_proj"},
        {"target_modules": r".*layers\.1\..*_proj"},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"], "use_dora": True},
        {"exclude_modules": ["model.layers.1.self_attn.q_proj"], "target_modules": ["q_proj", "v_proj"]},
        {"exclude_modules": r".*layers\.0\..*", "target_modules": ["q_proj", "v_proj"]},
        {"layers_to_transform": [1]},
    ],
    ids=["plain", "rslora", "dora", "expression", "layer", "names", "excluded", "excluding", "transformed"],
)
def test_model_starts_from_an_adapter_of_peft(base, tmp_path, settings):
    theirs = foreign(base, tmp_path / "adapter", **settings)
    model = Pretrained(base, adapter=str(tmp_path / "adapter")).causal()
    with torch.no_grad():
        expected = (
            torch.nn.functional.log_softmax(theirs(IDS).logits, -1)[:, :-1].gather(2, IDS[:, 1:, None]).squeeze(2)
        )
        torch.testing.assert_close(logprobs(model), expected, atol=1e-6, rtol=0)
        without = logprobs(Pretrained(base).causal())
    assert (without - expected).abs().max() > 0.01
    assert all(p.requires_grad == is_adapter(name) for name, p in model.lm.named_parameters())


def test_adapter_of_the_hub_is_read_from_its_cache(base, tmp_path, monkeypatch):
    repository = tmp_path / "cache/models--someone--adapter"
    foreign(base, repository / "snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from_hub = Pretrained(base, adapter="someone/adapter")
    from_directory = Pretrained(base, adapter=str(repository / "snapshots/abc"))
    assert from_hub.lora == LoRA(3, 12, target_modules=["q_proj"])
    assert torch.equal(logprobs(from_hub.causal()), logprobs(from_directory.causal()))
    with pytest.raises(FileNotFoundError, match="no adapter at 'someone/other': not a local directory"):
        Pretrained(base, adapter="someone/other")


def test_settings_are_read_from_the_files(base, tmp_path):
    foreign(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"], use_rslora=True)
    assert read_lora(tmp_path / "adapter") == LoRA(3, 12, ["down_proj", "q_proj"], rslora=True)
    source = Pretrained(base, adapter=str(tmp_path / "adapter"))
    assert source.lora == read_lora(tmp_path / "adapter")
    assert replace(source, lora=None, adapter=None) == Pretrained(base)


def test_saved_adapter_is_read_back_bitwise(base, tmp_path):
    lora = LoRA(2, 6, ["q_proj", "up_proj"], dora=True)
    model = randomize_adapters(Pretrained(base, lora=lora).causal())
    weights = {name: tensor for name, tensor in parameters_of(model.lm).items() if is_adapter(name)}
    save_adapter(lora, weights, tmp_path / "adapter", base)
    again = Pretrained(base, adapter=str(tmp_path / "adapter")).causal()
    assert all(torch.equal(again.lm.get_parameter(name), tensor) for name, tensor in weights.items())


def test_layer_that_was_excluded_has_no_adapter(base, tmp_path):
    model = Pretrained(base, lora=LoRA(2, 4, exclude_modules=["down_proj", "layers.0.self_attn.q_proj"])).causal()
    layers = {name.partition(".lora_")[0] for name, _ in model.lm.named_parameters() if is_adapter(name)}
    assert "model.layers.1.self_attn.q_proj" in layers
    assert not [name for name in layers if name.endswith(("down_proj", "layers.0.self_attn.q_proj"))]
    assert len(layers) == 2 * 6 - 1


def test_exclusions_are_saved_and_read_back(base, tmp_path):
    lora = LoRA(2, 4, exclude_modules=["down_proj", "layers.0.self_attn.q_proj"])
    model = randomize_adapters(Pretrained(base, lora=lora).causal())
    weights = {name: tensor for name, tensor in parameters_of(model.lm).items() if is_adapter(name)}
    save_adapter(lora, weights, tmp_path / "adapter", base)
    again = Pretrained(base, adapter=str(tmp_path / "adapter"))
    assert "layers.1.self_attn.q_proj" in again.lora.target_modules
    assert "layers.0.self_attn.q_proj" not in again.lora.target_modules
    assert torch.equal(logprobs(again.causal()), logprobs(model))


def test_adapter_of_single_layers_is_saved_as_peft_reads_it(base, tmp_path):
    foreign(base, tmp_path / "first", target_modules=r".*layers\.1\..*(q|up)_proj")
    source = Pretrained(base, adapter=str(tmp_path / "first"))
    model = source.causal()
    weights = {name: tensor for name, tensor in parameters_of(model.lm).items() if is_adapter(name)}
    save_adapter(source.lora, weights, tmp_path / "second", base)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "second")
    layers = {name.partition(".lora_")[0] for name, _ in theirs.named_parameters() if ".lora_A" in name}
    assert {name.partition("layers.")[2] for name in layers} == {"1.self_attn.q_proj", "1.mlp.up_proj"}
    assert torch.equal(logprobs(Pretrained(base, adapter=str(tmp_path / "second")).causal()), logprobs(model))


def test_dropout_of_an_adapter_is_named_and_can_be_used(base, tmp_path, caplog):
    foreign(base, tmp_path / "adapter", lora_dropout=0.25)
    with caplog.at_level("INFO"):
        source = Pretrained(base, adapter=str(tmp_path / "adapter"))
    assert "was trained with lora_dropout 0.25, which is not used" in caplog.text
    assert source.lora.dropout == 0.0
    same = Pretrained(base, adapter=str(tmp_path / "adapter"), lora=replace(source.lora, dropout=0.25))
    assert any(isinstance(layer, torch.nn.Dropout) and layer.p == 0.25 for layer in same.causal().modules())


def test_exclusions_of_layers_without_adapters_are_accepted(base, tmp_path):
    foreign(base, tmp_path / "adapter", exclude_modules=["lm_head"])
    assert Pretrained(base, adapter=str(tmp_path / "adapter")).causal() is not None


def test_scalar_model_is_saved_with_head_and_scale_and_loaded_by_peft(base, tmp_path):
    lora = LoRA(2, 4)
    model = randomize_adapters(Pretrained(base, lora=lora).scalar())
    model.lm.score.weight.data.normal_()
    model.fit_normalization(torch.tensor([1.0, 2.0, 6.0]))
    named = parameters_of(model.lm).items()
    weights = {name: tensor for name, tensor in named if is_adapter(name) or name == "score.weight"}
    save_adapter(lora, weights, tmp_path / "adapter", base, model.adapter_metadata)
    again = Pretrained(base, adapter=str(tmp_path / "adapter")).scalar()
    assert torch.equal(again(IDS, INDEX), model(IDS, INDEX))
    assert (again.score_mean, again.score_std) == (model.score_mean, model.score_std) != (0, 1)
    lm = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    lm.config.pad_token_id = 0
    theirs = peft.PeftModel.from_pretrained(lm, tmp_path / "adapter").eval()
    with torch.no_grad():
        last = theirs(IDS).logits.squeeze(1)
    torch.testing.assert_close(model.lm.score(model.lm.model(IDS).last_hidden_state)[:, -1, 0], last)


def test_critic_may_start_from_the_adapter_of_a_language_model(base, tmp_path):
    foreign(base, tmp_path / "adapter")
    critic = Pretrained(base, adapter=str(tmp_path / "adapter")).scalar()
    stored = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.lora_B"
    assert torch.equal(critic.lm.get_parameter(f"{name}.default.weight"), stored[f"base_model.model.{name}.weight"])
    assert not critic.lm.score.weight.any()


# -- files that do not fit --------------------------------------------------------------------------------------------


def rejected(message, base, adapter, **options):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Pretrained(base, adapter=str(adapter), **options).causal()


def test_adapter_of_another_base_is_rejected_before_weights_are_read(base, tmp_path, monkeypatch):
    FromConfig(TINY_LLAMA | {"hidden_size": 16}, seed=0).causal().save_pretrained(tmp_path / "other")
    foreign(str(tmp_path / "other"), tmp_path / "adapter")
    with monkeypatch.context() as patched:
        patched.setattr(Pretrained, "_read", lambda *_: pytest.fail("weights were read"))
        rejected(
            r"does not fit the model '.*base': model.layers.0.self_attn.q_proj.lora_A.weight is 3 x 16 in the adapter "
            r"and 3 x 32 in the model; its base model is .*other",
            base, tmp_path / "adapter",
        )  # fmt: skip
    FromConfig(GPT2, seed=0).causal().save_pretrained(tmp_path / "gpt2")
    rejected(
        "lora: target_modules q_proj not found among the linear layers", str(tmp_path / "gpt2"), tmp_path / "adapter"
    )


def test_kinds_that_are_not_supported_are_named(base, tmp_path):
    for number, (settings, message) in enumerate((
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight"),
        ({"rank_pattern": {"q_proj": 1}}, "rank_pattern"),
        ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens"),
    )):  # fmt: skip
        foreign(base, tmp_path / str(number), **settings)
        rejected(f"was trained with .*{message}.*, which is not supported: merge it", base, tmp_path / str(number))


def test_changed_configurations_are_rejected(base, tmp_path):
    foreign(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    for change, message in (
        ({"peft_type": "IA3"}, "has peft_type IA3: only LoRA"),
        ({"lora_alpha": 12.5}, "has lora_alpha 12.5"),
        ({"init_lora_weights": "pissa_niter_4"}, "trained with init_lora_weights pissa_niter_4"),
        ({"r": "many"}, "adapter_config.json is damaged: ValueError"),
        ({"r": 5}, "lora_A.weight is 3 x 32 in the adapter and 5 x 32 in the model"),
    ):
        file.write_text(json.dumps(config | change))
        rejected(message, base, tmp_path / "adapter")


def test_missing_and_damaged_files_are_named(base, tmp_path):
    rejected("no adapter at '.*nowhere': adapter_config.json is missing", base, tmp_path / "nowhere")
    rejected("it contains a whole model: set it as path, not as adapter", base, base)
    foreign(base, tmp_path / "adapter")
    (tmp_path / "adapter" / ADAPTER_WEIGHTS).write_bytes(b"damaged")
    rejected("adapter_model.safetensors is damaged", base, tmp_path / "adapter")
    (tmp_path / "adapter" / ADAPTER_WEIGHTS).unlink()
    rejected("adapter_model.safetensors is missing", base, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.bin").touch()
    rejected("adapter_model.bin is a pickled file, which can run code and is not read", base, tmp_path / "adapter")


def test_the_same_settings_beside_an_adapter_may_have_another_order(base, tmp_path):
    foreign(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    for targets in (["q_proj", "v_proj"], ["v_proj", "q_proj"]):
        lora = LoRA(3, 12, target_modules=targets)
        assert Pretrained(base, adapter=str(tmp_path / "adapter"), lora=lora).lora.rank == 3


def test_own_settings_beside_an_adapter_are_rejected(base, tmp_path):
    foreign(base, tmp_path / "adapter")
    rejected(
        "has its own settings, .*rank=3.*: remove lora beside adapter", base, tmp_path / "adapter", lora=LoRA(8, 16)
    )


def test_layers_without_weights_are_named(base, tmp_path):
    foreign(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER_WEIGHTS
    stored = {name: tensor for name, tensor in load_file(file).items() if "layers.1" not in name}
    save_file(stored, file)
    rejected("model.layers.1.self_attn.q_proj.lora_A.weight is missing in the adapter", base, tmp_path / "adapter")


def test_loaded_texts_are_returned(base, tmp_path):
    model = Pretrained(base, lora=LoRA(1, 1, ["q_proj"])).causal()
    weights = {name: tensor for name, tensor in parameters_of(model.lm).items() if is_adapter(name)}
    save_adapter(LoRA(1, 1), weights, tmp_path / "adapter", metadata={"note": "x"})
    assert load_adapter(model.lm, tmp_path / "adapter")["note"] == "x"
