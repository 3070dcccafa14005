"""Every recipe: shapes and memory at full size, without weights, and a complete step with a small copy of its model."""

import re
import warnings

import bitsandbytes
import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from transformers import AutoModelForSequenceClassification, LlamaConfig

from lightning_rlhf.extras.plan import command
from lightning_rlhf.extras.plan.architecture import architecture as planned_for
from lightning_rlhf.extras.plan.plan import GIB, plan
from lightning_rlhf.models.loading import FromConfig, Pretrained
from tests.cli.published_architectures import PUBLISHED, width_of, with_text
from tests.cli.small_recipes import (
    RECIPES,
    ROOT,
    load_config,
    models_of,
    published,
    saved_tokenizer,
    shrunk,
    write_data,
)

DEFAULT = {  # one for each architecture and module; the others are slow only because there are many
    "deepseek7b_full_hh_rlhf",
    "deepseek7b_full_hh_reward",
    "qwen2_7b_reward_model",
    "qwen1.5_moe_gsm8k",
    "moonlight_16b_a3b_gsm8k",
    "gemma2_2b",
    "qwen2.5_3b_lora",
    "qwen3_8b_npu",
    "qwen2.5_32b_dapo",
    "qwen3_30b_a3b_grpo",
    "ppo_0.5b",
    "qwen2.5_vl_7b",
    "qwen3_vl_4b",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with a chat template, saved."""
    return saved_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def other_reward_model(tmp_path_factory, tokenizer):
    """A reward model with a separate tokenizer."""
    directory = tmp_path_factory.mktemp("reward_model")
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def npu():
    """An accelerator of an external package; here the CPU under another name."""

    class NPU(CPUAccelerator):
        @staticmethod
        def name():
            return "npu"

    AcceleratorRegistry.register("npu", NPU, description="stands in for a package's own")
    yield
    AcceleratorRegistry.remove("npu")


def moved_by_optimizers(monkeypatch):
    """Record whether an optimizer changed any of its weights, by the identity of the first one."""
    moved = {}

    def recorded(step):
        def step_and_record(self, *arguments, **options):
            weights = self.param_groups[0]["params"]
            before = [weight.detach().clone() for weight in weights]
            step(self, *arguments, **options)
            changed = [not torch.allclose(*pair, rtol=2e-7, atol=0) for pair in zip(before, weights, strict=True)]
            moved[id(weights[0])] = moved.get(id(weights[0]), False) or any(changed)

        return step_and_record

    for kind in (torch.optim.AdamW, bitsandbytes.optim.AdamW8bit):
        monkeypatch.setattr(kind, "step", recorded(kind.step))
    return moved


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in DEFAULT else pytest.mark.slow) for path in RECIPES],
)
def test_complete_step_with_a_small_copy_of_the_model(path, fit, tokenizer, other_reward_model, npu, monkeypatch):
    pytest.importorskip("math_verify")
    if "lora" in path.stem:
        pytest.importorskip("peft")
    config = shrunk(path, tokenizer, other_reward_model)
    write_data(config)
    moved = moved_by_optimizers(monkeypatch)
    result = fit(config, "--trainer.fast_dev_run", "1")
    assert (result.code, result.err, result.warned) == (0, "", [])
    roles = 2 if config["model"]["class_path"].endswith("PPOModule") else 1
    assert len(moved) >= roles
    assert all(moved.values())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_documented_memory_equals_that_of_plan(path, monkeypatch, capsys):
    runs, config = [], load_config(path)

    def recorded_plan(run, gpus):
        runs.append(plan(run, gpus))
        return runs[-1]

    monkeypatch.setattr(Pretrained, "hf_config", lambda self: FromConfig(published(self.path)).hf_config())
    monkeypatch.setattr(command, "plan", recorded_plan)
    head = path.read_text(encoding="utf-8")
    count, size = re.search(r"^# Hardware: (\d+) \w+ of (\d+) GiB", head, re.MULTILINE).groups()
    nodes = config["trainer"].get("num_nodes", 1)
    assert int(count) == config["trainer"]["devices"] * nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what Python does outside of tests
        code = command.run(["--config", str(path), "--gpus", count, "--gpu-memory-gib", size, "--nodes", str(nodes)])
    assert code == 0, capsys.readouterr().err
    (output,) = re.findall(r"^# Expected memory: ([\d.]+) GiB of each, by", head, re.MULTILINE)
    assert float(output) == round(runs[-1].total / GIB, 1)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_header_describes_purpose_hardware_and_published_results(path):
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    assert len(head) >= 3
    assert sum("The reference publishes" in line for line in head) == 1
    assert max(len(line) for line in path.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_architecture_has_the_published_number_of_parameters(model):
    architecture, billions = PUBLISHED[model]
    with torch.device("meta"):
        result, scalar = FromConfig(architecture).causal(), FromConfig(architecture).scalar()
    count = sum(value.numel() for value in result.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.005)
    assert planned_for(FromConfig(architecture).hf_config()).elements == count
    critic = planned_for(FromConfig(architecture).hf_config(), scalar=True)
    assert critic.elements == sum(value.numel() for value in scalar.parameters())


@pytest.mark.parametrize(
    ("model", "numbers"),
    [
        ("deepseek-ai/deepseek-llm-7b-chat", 30 * 2 * 32 * 128),  # layers, keys and values, heads, their width
        ("Qwen/Qwen2-7B-Instruct", 28 * 2 * 4 * 128),
        ("google/gemma-2-2b-it", 26 * 2 * 4 * 256),
        ("Qwen/Qwen3-30B-A3B", 48 * 2 * 4 * 128),
        ("moonshotai/Moonlight-16B-A3B-Instruct", 27 * (512 + 64)),  # what keys and values are made from, and positions
    ],
)
def test_cache_size_per_token_equals_the_value_computed_by_hand(model, numbers):
    result = planned_for(FromConfig(PUBLISHED[model][0]).hf_config())
    assert sum(layer.cache_elements(1) for layer in result.layers) == numbers


@pytest.mark.parametrize("model", PUBLISHED)
def test_two_layers_at_full_width_have_the_shapes_of_the_whole_model_as_lm_and_scalar_model(model):
    architecture = PUBLISHED[model][0]
    with torch.device("meta"):
        whole = FromConfig(architecture).causal()
        actor = FromConfig(with_text(architecture, num_hidden_layers=2)).causal()
        critic = FromConfig(with_text(architecture, num_hidden_layers=2)).scalar()
    shapes = {name: value.shape for name, value in whole.lm.named_parameters()}
    result = {name: value.shape for name, value in actor.lm.named_parameters()}
    assert len(result) > 10
    assert result.items() <= shapes.items()
    assert critic.lm.score.weight.shape == (1, width_of(architecture))
    head = {"lm_head.weight", "score.weight"}
    assert {n: v.shape for n, v in critic.lm.named_parameters() if n not in head} == {
        n: shape for n, shape in result.items() if n not in head
    }


def test_every_architecture_is_tested_and_every_recipe_is_listed():
    by_default = {
        published(model)["model_type"]
        for path in RECIPES
        if path.stem in DEFAULT
        for model in models_of(load_config(path)).values()
    }
    assert by_default == {architecture["model_type"] for architecture, _ in PUBLISHED.values()}
    table = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    links = {path: f"recipes/{path.relative_to(ROOT / 'configs/recipes')}" for path in RECIPES}
    assert set(links.values()) == set(re.findall(r"\]\((recipes/[^)]+\.yaml)\)", table))
    assert {path.stem for path in RECIPES} >= DEFAULT
    for path in RECIPES:
        (output,) = re.findall(r"^# Expected memory: ([\d.]+) GiB", path.read_text(encoding="utf-8"), re.MULTILINE)
        (row,) = (line for line in table.splitlines() if f"({links[path]})" in line)
        assert f"| {output} GiB |" in row
