"""Every recipe: shapes and memory at full size, without weights, and a whole step with a small copy of its model."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from transformers import AutoModelForSequenceClassification, LlamaConfig

from lightning_rlhf.cli import plan as command
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.planning.plan import GIB, plan
from tests.cli.published_architectures import MOONLIGHT, PUBLISHED, SMALL

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))
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
}
TRAINED_HERE = {"runs/recipes/deepseek7b_full_hh_reward/export": "deepseek-ai/deepseek-llm-7b-chat"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789:;#+-?.{}\\" '
LOOP = "lightning_rlhf.callbacks.RolloutLoop"


def spread(completions):
    """A reward of untrained text: all of it is wrong, and nothing could be learnt from that."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def given(path):
    """The configuration as it stands in the file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def published(model):
    """Published architecture of a model, or of the one that a recipe trains it from."""
    return PUBLISHED[TRAINED_HERE.get(model, model)][0]


def models_of(config):
    """Paths or hub ids of the models that a configuration names, by role."""
    options = config["model"]["init_args"]
    found = {role: options[role] for role in ("actor", "reward_model") if role in options}
    return {role: one["init_args"]["path"] if isinstance(one, dict) else one for role, one in found.items()}


def small(model, tokenizer, lora=None):
    """Source of a copy of the model with two layers and tiny widths, of the same configuration class."""
    architecture = published(model)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    architecture = architecture | SMALL[architecture["model_type"]] | special | {"vocab_size": len(tokenizer)}
    arguments = {"architecture": architecture} | ({"lora": lora} if lora else {})
    return {"class_path": "lightning_rlhf.FromConfig", "init_args": arguments}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with a chat template, saved."""
    made = CharacterTokenizer("".join(sorted(set(CHARACTERS)))).load()
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path_factory.mktemp("tokenizer"))
    made.directory = str(tmp_path_factory.getbasetemp() / "tokenizer0")
    return made


@pytest.fixture(scope="module")
def other_reward_model(tmp_path_factory, tokenizer):
    """A reward model with a tokenizer of its own."""
    directory = tmp_path_factory.mktemp("reward_model")
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return str(directory)


def rows_of(source):
    """Rows in verl's layout, as its preparation of this data writes them."""
    if "/rm/" in source:
        return [{"prompt": f"say {i}: ", "chosen": f"{i}", "rejected": "no"} for i in range(8)]
    tests = '{"inputs": ["1"], "outputs": ["2"]}'
    truth = tests if "code" in source else "2"
    return [
        {
            "data_source": source.split("/")[2],
            "prompt": [{"role": "user", "content": f"what is {i}+{i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(8)
    ]


def shrunk(path, tokenizer, other_reward_model):
    """The recipe with another model, sizes, devices and engine, and a reward that random texts do not earn alike."""
    config = copy.deepcopy(given(path))
    options, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    for role, model in models_of(config).items():
        lora = options[role]["init_args"].get("lora") if isinstance(options[role], dict) else None
        options[role] = small(model, tokenizer, lora)
    options |= {"micro_batch_tokens": 512} | ({"minibatch_size": 4} if "minibatch_size" in options else {})
    data |= {"tokenizer": tokenizer.directory, "batch_size": 4, "max_tokens": 128}
    trainer |= {"devices": 1, "num_nodes": 1, "precision": "32-true", "strategy": "rlhf_single"}
    trainer.setdefault("accelerator", "cpu")
    for loop in (entry["init_args"] for entry in trainer["callbacks"] if LOOP in str(entry)):
        loop |= {"engine": "lightning_rlhf.rollout.transformers_engine.TransformersEngine", "max_response_tokens": 8}
        loop["group_size"] = min(loop.get("group_size", 1), 4)
        if "dynamic_sampling" in loop:
            loop["dynamic_sampling"] |= {"prompts_per_step": 4, "reward": "spread"}
        loop["rewards"] = [*loop.get("rewards", []), {"function": "tests.cli.test_recipes.spread"}]
        for reward in loop["rewards"]:
            if "LearnedReward" in str(reward):
                reward["function"]["init_args"] |= {"path": other_reward_model, "dtype": "float32"}
    return config


def write_data(config):
    """The files that a recipe names, at the places where it looks for them."""
    options = config["data"]["init_args"]
    for sources in (options["train"], options["val"]):
        for source in [sources] if isinstance(sources, str) else sources:
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows_of(source)).to_parquet(source)


@pytest.fixture
def npu():
    """An accelerator that another package would bring; here the CPU under its name."""

    class NPU(CPUAccelerator):
        @staticmethod
        def name():
            return "npu"

    AcceleratorRegistry.register("npu", NPU, description="stands in for a package's own")
    yield
    AcceleratorRegistry.remove("npu")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in DEFAULT else pytest.mark.slow) for path in RECIPES],
)
def test_a_whole_step_with_a_small_copy_of_the_model(path, fit, tokenizer, other_reward_model, npu, monkeypatch):
    pytest.importorskip("math_verify")
    if "lora" in path.stem:
        pytest.importorskip("peft")
    config = shrunk(path, tokenizer, other_reward_model)
    write_data(config)
    moved, step = {}, torch.optim.AdamW.step

    def watched(self, *arguments, **options):
        values = self.param_groups[0]["params"]
        before = [value.detach().clone() for value in values]
        step(self, *arguments, **options)
        now = [not torch.allclose(*pair, rtol=2e-7, atol=0) for pair in zip(before, values, strict=True)]
        moved[id(values[0])] = moved.get(id(values[0]), False) or any(now)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    result = fit(config, "--trainer.fast_dev_run", "1")
    assert (result.code, result.err, result.warned) == (0, "", [])
    roles = 2 if config["model"]["class_path"].endswith("PPOModule") else 1
    assert len(moved) >= roles
    assert all(moved.values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_memory_that_it_names_is_the_plan_s(path, monkeypatch, capsys):
    runs, config = [], given(path)
    monkeypatch.setattr(Pretrained, "hf_config", lambda self: FromConfig(published(self.path)).hf_config())
    monkeypatch.setattr(command, "plan", lambda run, gpus: (runs.append(plan(run, gpus)), runs[-1])[1])
    head = path.read_text(encoding="utf-8")
    count, size = re.search(r"^# Hardware: (\d+) \w+ of (\d+) GiB", head, re.MULTILINE).groups()
    nodes = config["trainer"].get("num_nodes", 1)
    assert int(count) == config["trainer"]["devices"] * nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what Python does outside of tests
        code = command.run(["--config", str(path), "--gpus", count, "--gpu-memory-gib", size, "--nodes", str(nodes)])
    if path.stem.startswith("moonlight"):
        assert "the plan knows decoder-only models" in capsys.readouterr().err
        with torch.device("meta"):
            actor, critic = (made() for made in (FromConfig(MOONLIGHT).causal, FromConfig(MOONLIGHT).scalar))
        states = 16 * sum(value.numel() for model in (actor, critic) for value in model.parameters()) / int(count)
        assert f"alone take {states / GIB:.1f} GiB of each" in head
        return
    assert code == 0, capsys.readouterr().err
    (said,) = re.findall(r"^# Expected memory: ([\d.]+) GiB of each, by", head, re.MULTILINE)
    assert float(said) == round(runs[-1].total / GIB, 1)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_head_says_what_it_shows_on_what_and_what_the_reference_publishes(path):
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    assert len(head) >= 3
    assert sum("The reference publishes" in line for line in head) == 1
    assert max(len(line) for line in path.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_published_architecture_has_the_published_number_of_parameters(model):
    architecture, billions = PUBLISHED[model]
    with torch.device("meta"):
        found = FromConfig(architecture).causal()
    assert sum(value.numel() for value in found.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("model", PUBLISHED)
def test_two_layers_of_the_true_width_have_the_whole_model_s_shapes_in_both_kinds_of_model(model):
    architecture = PUBLISHED[model][0]
    with torch.device("meta"):
        whole, actor = (FromConfig(architecture | few).causal() for few in ({}, {"num_hidden_layers": 2}))
        critic = FromConfig(architecture | {"num_hidden_layers": 2}).scalar()
    shapes = {name: value.shape for name, value in whole.lm.named_parameters()}
    found = {name: value.shape for name, value in actor.lm.named_parameters()}
    assert len(found) > 10
    assert found.items() <= shapes.items()
    assert critic.lm.score.weight.shape == (1, architecture["hidden_size"])
    head = {"lm_head.weight", "score.weight"}
    assert {n: v.shape for n, v in critic.lm.named_parameters() if n not in head} == {
        n: shape for n, shape in found.items() if n not in head
    }


def test_every_architecture_is_stepped_by_default_and_every_recipe_is_listed():
    by_default = {
        published(model)["model_type"]
        for path in RECIPES
        if path.stem in DEFAULT
        for model in models_of(given(path)).values()
    }
    assert by_default == {architecture["model_type"] for architecture, _ in PUBLISHED.values()}
    table = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    assert {f"recipes/{path.name}" for path in RECIPES} == set(re.findall(r"\]\((recipes/[^)]+\.yaml)\)", table))
    assert {path.stem for path in RECIPES} >= DEFAULT
