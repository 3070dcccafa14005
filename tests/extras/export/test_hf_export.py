"""Exports can be loaded by transformers and contain the trained weights."""

import json
import math

import peft
import pytest
import torch
from lightning.pytorch import Callback
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.callbacks import HFExport
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.extras.records.val_metrics import with_interval
from lightning_rlhf.models.lora import LoRA, is_adapter
from tests.callbacks.conftest import ROWS
from tests.stand_ins import TinyModel


def same(left, right):
    left, right = dict(left.named_parameters()), dict(right.named_parameters())
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_transformers_loads_the_trained_actor_and_its_tokenizer(run, tmp_path):
    made = run(callbacks=[HFExport()], data={"val": InMemory(ROWS)}).fit()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", use_safetensors=True)
    assert same(loaded, made.module.actor.lm)
    assert not same(loaded, TinyModel().causal().lm)  # the first weights
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] == [4, 5, 6]
    result = json.loads((tmp_path / "export" / "metrics.json").read_text())
    assert result["step"] == 2
    assert result["val/fraction_correct_greedy"] == made.metrics["val/fraction_correct_greedy"]
    card = (tmp_path / "export" / "README.md").read_text()
    shown = with_interval("val/fraction_correct_greedy", result)
    assert f"| `val/fraction_correct_greedy` | {shown} |" in card
    assert "greedy_low" not in card
    assert "policy/clip_fraction" in result
    assert "clip_fraction" not in card


@pytest.mark.parametrize("adapter", [False, True])
def test_weights_have_the_permissions_of_the_other_files(run, tmp_path, adapter):
    run(callbacks=[HFExport(adapter=adapter)], model={"actor": TinyModel(lora=LORA)}).fit()
    assert len({path.stat().st_mode for path in (tmp_path / "export").iterdir()}) == 1


def test_every_n_steps_writes_separate_directories(run, tmp_path):
    made = run(callbacks=[HFExport(every_n_steps=1)]).fit()
    assert sorted(path.name for path in tmp_path.glob("export*")) == ["export", "export-1", "export-2"]
    first, second, last = (AutoModelForCausalLM.from_pretrained(tmp_path / f"export{s}") for s in ("-1", "-2", ""))
    assert not same(first, second)
    assert same(second, last)
    assert same(last, made.module.actor.lm)


def test_metrics_are_valid_json_and_keep_the_step(run, tmp_path):
    class LogsMetrics(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.log_dict({"step": 7.0, "mine": math.nan})

    run(callbacks=[LogsMetrics(), HFExport()]).fit()
    text = (tmp_path / "export" / "metrics.json").read_text()
    result = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))
    assert (result["step"], result["mine"]) == (2, None)


def test_earlier_and_partial_exports_are_replaced(run, tmp_path):
    for name in ("export", "export.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_text("old")
    run(callbacks=[HFExport()]).fit()
    assert not list(tmp_path.rglob("pytorch_model.bin"))
    assert not (tmp_path / "export.new").exists()


def test_trial_run_leaves_no_files(run, tmp_path):
    run(callbacks=[HFExport(every_n_steps=1)], trainer={"fast_dev_run": 1}).fit()
    assert not list(tmp_path.glob("export*"))


# -- adapters ---------------------------------------------------------------------------------------------------------

LORA = LoRA(rank=4, alpha=8)


def logits(lm):
    with torch.no_grad():
        return lm(torch.tensor([[3, 4, 5, 6]])).logits


def test_trained_adapter_is_exported_merged(run, tmp_path):
    made = run(callbacks=[HFExport()], model={"actor": TinyModel(lora=LORA)}).fit()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", use_safetensors=True)
    assert [name for name, _ in loaded.named_parameters()] == [
        name for name, _ in TinyModel().causal().lm.named_parameters()
    ]
    assert not torch.equal(logits(loaded), logits(TinyModel().causal().lm))
    torch.testing.assert_close(logits(loaded), logits(made.module.actor.lm), atol=1e-5, rtol=0)


def test_adapter_is_exported_separately_for_peft(run, tmp_path):
    made = run(callbacks=[HFExport(every_n_steps=1, adapter=True)], model={"actor": TinyModel(lora=LORA)}).fit()
    written = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "metrics.json"} <= written
    assert not written & {"model.safetensors", "config.json"}
    base = TinyModel().causal().lm
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "export", autocast_adapter_dtype=False)
    torch.testing.assert_close(logits(loaded), logits(made.module.actor.lm), atol=1e-6, rtol=0)
    ours = {name: p for name, p in made.module.actor.lm.named_parameters() if is_adapter(name)}
    theirs = {name.removeprefix("base_model.model."): p for name, p in loaded.named_parameters() if is_adapter(name)}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (tmp_path / "export-1" / "adapter_model.safetensors").is_file()


def test_missing_adapter_raises_before_the_run(run):
    with pytest.raises(ValueError, match=r"^HFExport\(adapter=True\) exports only LoRA adapters, but this run exp"):
        run(callbacks=[HFExport(adapter=True)]).fit()


@pytest.mark.slow
def test_sixteen_adapters_are_kept_and_switched_by_peft_and_transformers(run, tmp_path):
    class KeepsLogits(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            outputs_of_steps[trainer.global_step] = logits(pl_module.actor.lm)

    outputs_of_steps = {}
    model = {"actor": TinyModel(lora=LORA)}
    trainer = {"max_steps": 16, "max_epochs": -1}
    run(callbacks=[HFExport(every_n_steps=1, adapter=True), KeepsLogits()], model=model, trainer=trainer).fit()
    steps = sorted(int(path.name.removeprefix("export-")) for path in tmp_path.glob("export-*"))
    assert steps == list(range(1, 17))
    switched = peft.PeftModel.from_pretrained(
        TinyModel().causal().lm, tmp_path / "export-1", "1", autocast_adapter_dtype=False
    )
    for step in steps[1:]:
        switched.load_adapter(tmp_path / f"export-{step}", str(step), autocast_adapter_dtype=False)
    for step in (16, 1, 7):
        switched.set_adapter(str(step))
        torch.testing.assert_close(logits(switched), outputs_of_steps[step], atol=1e-6, rtol=0)
    of_transformers = TinyModel().causal().lm
    of_transformers.load_adapter(str(tmp_path / "export-7"))
    torch.testing.assert_close(logits(of_transformers), outputs_of_steps[7], atol=1e-6, rtol=0)
    assert not torch.allclose(outputs_of_steps[1], outputs_of_steps[7], atol=1e-6)
