"""Loading of weights, and rejected models."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from lightning_rlhf.models import loading
from lightning_rlhf.models.loading import (
    FromConfig,
    Pretrained,
    as_source,
    quiet_transformers,
    save_architecture,
)
from tests.stand_ins import TINY_LLAMA, TinyModel


def state(model):
    return model.lm.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def saved(tmp_path):
    """Directory of a tiny language model."""
    TinyModel().causal().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# -- from scratch -----------------------------------------------------------------------------------------------------


def test_weights_depend_only_on_the_seed():
    one = state(FromConfig(TINY_LLAMA, seed=3).causal())
    torch.rand(5)
    assert same(one, state(FromConfig(TINY_LLAMA, seed=3).causal()))
    assert not same(one, state(FromConfig(TINY_LLAMA, seed=4).causal()))


def test_run_seed_is_used_without_a_seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    one = state(FromConfig(TINY_LLAMA).causal())
    assert same(one, state(FromConfig(TINY_LLAMA).causal()))
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    assert not same(one, state(FromConfig(TINY_LLAMA).causal()))


def test_initialization_does_not_change_the_random_state():
    before = torch.get_rng_state()
    FromConfig(TINY_LLAMA, seed=3).causal()
    FromConfig(TINY_LLAMA, seed=3).scalar()
    assert torch.equal(torch.get_rng_state(), before)


def test_language_and_scalar_model_of_one_source_share_the_backbone_and_the_head_is_0():
    source = FromConfig(TINY_LLAMA, seed=3)
    causal, scalar = source.causal().lm.model.state_dict(), source.scalar().lm
    assert same(causal, scalar.model.state_dict())
    assert scalar.score.weight.shape == (1, 32)
    assert not scalar.score.weight.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_parameters_have_the_requested_dtype(saved, kind, dtype):
    for source in (FromConfig(TINY_LLAMA, dtype=dtype), Pretrained(str(saved), dtype=dtype)):
        model = getattr(source, kind)()
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


def test_missing_or_unknown_model_type_is_rejected():
    with pytest.raises(
        ValueError, match=r"^FromConfig.architecture needs 'model_type', for example 'qwen2' or 'llama'$"
    ):
        FromConfig({"hidden_size": 8}).hf_config()
    with pytest.raises(ValueError, match="lama2"):
        FromConfig({"model_type": "lama2"}).hf_config()


def test_dropout_is_disabled_everywhere(tmp_path):
    architecture = {
        "model_type": "gpt2", "vocab_size": 11, "n_embd": 32, "n_layer": 1, "n_head": 1, "n_positions": 16,
        "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3,
    }  # fmt: skip
    model = FromConfig(architecture).causal().train()
    assert {layer.p for layer in model.modules() if isinstance(layer, torch.nn.Dropout)} == {0.0}
    model.lm.config.resid_pdrop = 0.3  # as in some published directories
    model.save_pretrained(tmp_path)
    again = Pretrained(str(tmp_path)).causal().train()
    assert {layer.p for layer in again.modules() if isinstance(layer, torch.nn.Dropout)} == {0.0}
    assert FromConfig(TINY_LLAMA | {"attention_dropout": 0.3}).hf_config().attention_dropout == 0.0


# -- from a directory -------------------------------------------------------------------------------------------------


def test_saved_model_is_loaded(saved):
    assert same(state(Pretrained(str(saved)).causal()), state(TinyModel().causal()))


def test_scalar_model_of_a_language_model_scores_0_everywhere(saved):
    model = Pretrained(str(saved)).scalar()
    assert same(model.lm.model.state_dict(), TinyModel().causal().lm.model.state_dict())
    assert not model(torch.tensor([[3, 4, 5]]), torch.tensor([[0, 1, 2]])).any()


def test_trained_head_is_loaded(tmp_path):
    model = TinyModel().scalar()
    model.save_pretrained(tmp_path)
    assert torch.equal(Pretrained(str(tmp_path)).scalar().lm.score.weight, model.lm.score.weight)
    assert model.lm.score.weight.any()


def test_classifier_of_two_labels_is_rejected(tmp_path):
    config = TinyModel().hf_config()
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a classifier with 2 labels; a critic or reward model needs one \(num_"):
        Pretrained(str(tmp_path)).scalar()


def test_reward_model_cannot_be_an_actor_without_a_language_head(tmp_path):
    FromConfig(TINY_LLAMA | {"tie_word_embeddings": False}).scalar().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 parameters of LlamaForCausalLM: \['lm_head.weight'\]"):
        Pretrained(str(tmp_path)).causal()


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "nowhere", "runs/never/sft/export"])
def test_missing_directory_is_reported(path):
    with pytest.raises(FileNotFoundError) as error:
        Pretrained(path).causal()
    assert str(error.value).startswith(
        f"no model at {path!r}: expected a directory with config.json and safetensors "
        f"(an earlier run's export, for example) or a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'; "
        f"looked at {Path(path).absolute()}"
    )


def test_existing_directory_without_a_model_is_not_searched_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "one" / "two").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model at 'one/two': expected a directory with config.json"):
        Pretrained("one/two").causal()


@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_pickled_weights_are_not_loaded(saved, kind):
    """A pickle can run code; only safetensors are read."""
    (saved / "model.safetensors").unlink()
    torch.save(state(TinyModel().causal()), saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected safetensors, but pytorch_model.bin has pickled weights, which can"):
        getattr(Pretrained(str(saved)), kind)()


@pytest.mark.parametrize("beside", [(), ("adapter_model.safetensors",)])
def test_index_of_pickled_weights_is_reported(saved, beside):
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}')
    for name in beside:
        (saved / name).touch()
    message = (
        r"has neither model.safetensors nor model.safetensors.index.json, .* contains adapter_model.safetensors: copy"
    )
    with pytest.raises(
        ValueError, match=message if beside else r"but pytorch_model.bin.index.json has pickled weights"
    ):
        Pretrained(str(saved)).causal()


def test_code_next_to_the_weights_is_not_run(saved):
    (saved / "evil.py").write_text("raise SystemExit('code from the model directory ran')\n")
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, OSError)):
        Pretrained(str(saved)).causal()


# -- around -----------------------------------------------------------------------------------------------------------


def test_string_is_a_path():
    assert as_source("x/y") == Pretrained("x/y")
    source = TinyModel()
    assert as_source(source) is source


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_architecture_is_sufficient_to_build_the_model(tmp_path, dtype):
    save_architecture(TinyModel(dtype=dtype), tmp_path / "engine")
    assert os.listdir(tmp_path / "engine") == ["config.json"]
    written = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["dtype"] == dtype
    assert written["head_dim"] == 32
    assert written["head_dtype"] == "float32"
    save_architecture(replace(TinyModel(dtype=dtype), float32_logits=False), tmp_path / "rounded")
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["head_dtype"] == "model"


@pytest.mark.parametrize("shown", [True, False])
def test_verbosity_of_transformers_is_restored(shown):
    logs = transformers.utils.logging
    before, level = logs.is_progress_bar_enabled(), logs.get_verbosity()
    logs.set_verbosity_info()
    (logs.enable_progress_bar if shown else logs.disable_progress_bar)()
    with quiet_transformers():
        assert not logs.is_progress_bar_enabled()
        assert logs.get_verbosity() == 40
    assert logs.is_progress_bar_enabled() == shown
    assert logs.get_verbosity() == 20
    logs.set_verbosity(level)
    (logs.enable_progress_bar if before else logs.disable_progress_bar)()


def test_router_logits_without_a_loss_warn_once(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    loading._warn_once.cache_clear()
    for value in (False, True, True):
        FromConfig({"model_type": "mixtral", "output_router_logits": value}).hf_config()
    message = (
        "output_router_logits in the architecture 'mixtral' has no effect: use the callback RouterReplay with "
        "balance_coef"
    )
    assert [record.getMessage() for record in caplog.records if record.name.startswith("lightning_rlhf")] == [message]


def test_unknown_architecture_is_reported_with_a_suggestion():
    with pytest.raises(ValueError, match="has no model_type 'lama'; did you mean 'llama'"):
        FromConfig({"model_type": "lama"}).hf_config()


def test_misspelt_field_is_rejected_and_fields_of_related_models_are_accepted():
    with pytest.raises(
        ValueError, match=r"'llama' has no field 'num_hiden_layers'; did you mean 'num_hidden_layers'\?"
    ):
        FromConfig(TINY_LLAMA | {"num_hiden_layers": 2}).hf_config()
    with pytest.raises(ValueError, match=r"did you mean 'max_position_embeddings'\?"):
        FromConfig(TINY_LLAMA | {"max_position_embedding": 2}).hf_config()
    FromConfig(TINY_LLAMA | {"rope_theta": 1e6, "torch_dtype": "float32", "use_sliding_window": False}).hf_config()
    FromConfig({"model_type": "glm4_moe_lite", "head_dim": 64}).hf_config()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"the config.json of '.*' cannot be read: .* is not a valid JSON file"),
        ("{}", r"the config.json of '.*' cannot be read: Unrecognized model in"),
        (
            '{"model_type": "llamma"}',
            r"the config.json of '.*' cannot be read: .* model type `llamma` but Transformers",
        ),
        ("3", r"the config.json of '.*' cannot be read: TypeError: argument of type 'int' is not iterable"),
        ('{"model_type": "llama", "id2label": 4}', "cannot be read: AttributeError: 'int' object has no attribute"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "cannot be read: ZeroDivisionError: "),
        ('{"model_type": "llama", "dtype": "floaty"}', "cannot be read: AttributeError: module 'torch' has no"),
    ],
)
def test_damaged_configuration_raises_a_one_line_error(saved, content, message):
    (saved / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        Pretrained(str(saved)).hf_config()
    assert "\n" not in str(caught.value)


def test_configuration_that_gives_no_model_is_reported(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"hidden_act": "nope"}))
    with pytest.raises(
        ValueError, match=r"^the model in '.*' cannot be built from its config.json .*: KeyError: 'nope'$"
    ):
        Pretrained(str(saved)).causal()


def test_partly_missing_weights_raise_a_one_line_error(saved):
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ValueError, match=r"^the weights of '.*' cannot be read, a file is damaged: "):
        Pretrained(str(saved)).causal()
