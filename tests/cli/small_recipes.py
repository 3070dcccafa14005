"""A recipe reduced to the size of a test: the same modules, data and callbacks, with a model of two small layers."""

import copy
from pathlib import Path

import yaml
from datasets import Dataset

from lightning_rlhf import FromConfig
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from tests.cli.published_architectures import PUBLISHED, SMALL
from tests.vision_models import drawing, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs/recipes").rglob("*.yaml"))
TRANSFORMERS = "lightning_rlhf.rollout.transformers.TransformersEngine"
TRAINED_HERE = {"runs/recipes/deepseek7b_full_hh_reward/export": "deepseek-ai/deepseek-llm-7b-chat"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789:;#+-?.{}\\" '
LOOP = "lightning_rlhf.callbacks.RolloutLoop"


def saved_tokenizer(directory):
    """Save a tokenizer with a chat template and return it; its attribute ``directory`` is the path."""
    made = CharacterTokenizer("".join(sorted(set(CHARACTERS)))).load()
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)
    made.directory = str(directory)
    return made


def spread(completions):
    """Return pseudo-random rewards, because rewards of random text would all be zero and give no gradient."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def load_config(path):
    """Return the configuration of a file without changes."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def published(model):
    """Return the published architecture of a model; for a model that another recipe trains, that of its base model."""
    return PUBLISHED[TRAINED_HERE.get(model, model)][0]


def models_of(config):
    """Return paths or hub ids of the models in a configuration, by role."""
    options = config["model"]["init_args"]
    result = {role: options[role] for role in ("actor", "reward_model") if role in options}
    return {role: one["init_args"]["path"] if isinstance(one, dict) else one for role, one in result.items()}


def small(model, tokenizer, lora=None, quantization=None):
    """Return the source of a copy of the model with two layers and tiny widths, of the same configuration class."""
    architecture = published(model)
    if "vision_config" in architecture:
        return str(write_checkpoint(architecture["model_type"], Path("small")))
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    architecture = architecture | SMALL[architecture["model_type"]] | special | {"vocab_size": len(tokenizer)}
    if quantization:
        FromConfig(architecture, seed=0).causal().save_pretrained("small")
        arguments = {"path": "small", "quantization": quantization, "lora": lora}
        return {"class_path": "lightning_rlhf.Pretrained", "init_args": arguments}
    arguments = {"architecture": architecture} | ({"lora": lora} if lora else {})
    return {"class_path": "lightning_rlhf.FromConfig", "init_args": arguments}


def rows_of(source):
    """Return rows in verl's layout, as its preprocessing of this data set writes them."""
    if "/rm/" in source:
        return [{"prompt": f"write {i}: ", "chosen": f"{i}", "rejected": "no"} for i in range(8)]
    if "/geo3k/" in source:
        return [
            {
                "data_source": "geo3k",
                "prompt": [{"role": "user", "content": f"<image>compute {i}?"}],
                "images": [{"bytes": drawing(i).data}],
                "reward_model": {"style": "rule", "ground_truth": "2"},
            }
            for i in range(8)
        ]
    tests = '{"inputs": ["1"], "outputs": ["2"]}'
    truth = tests if "code" in source else "2"
    return [
        {
            "data_source": source.split("/")[2],
            "prompt": [{"role": "user", "content": f"compute {i}+{i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(8)
    ]


def shrunk(path, tokenizer, other_reward_model, engine=TRANSFORMERS):
    """Return the recipe at a small size with other models, devices and engine, and varying rewards."""
    config = copy.deepcopy(load_config(path))
    options, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    for role, model in models_of(config).items():
        source = options[role]["init_args"] if isinstance(options[role], dict) else {}
        made = small(model, tokenizer, source.get("lora"), source.get("quantization"))
        if "critic" in options and options["critic"] == options[role]:
            options["critic"] = made
        options[role] = made
    options |= {"micro_batch_tokens": 512} | ({"minibatch_size": 4} if "minibatch_size" in options else {})
    has_images = "vision_config" in published(next(iter(models_of(load_config(path)).values())))
    data |= {"tokenizer": "small" if has_images else tokenizer.directory, "batch_size": 4, "max_tokens": 128}
    trainer |= {"devices": 1, "num_nodes": 1, "precision": "32-true", "strategy": "rlhf_single"}
    trainer.setdefault("accelerator", "cpu")
    for loop in (entry["init_args"] for entry in trainer["callbacks"] if LOOP in str(entry)):
        loop |= {"engine": engine, "max_response_tokens": 8}
        loop["group_size"] = min(loop.get("group_size", 1), 4)
        if "dynamic_sampling" in loop:
            loop["dynamic_sampling"] |= {"prompts_per_step": 4, "reward": "spread"}
        loop["rewards"] = [*loop.get("rewards", []), {"function": "tests.cli.small_recipes.spread"}]
        for reward in loop["rewards"]:
            if "LearnedReward" in str(reward):
                reward["function"]["init_args"] |= {"path": other_reward_model, "dtype": "float32"}
    return config


def write_data(config):
    """Write the data files of a recipe to the paths in its configuration."""
    options = config["data"]["init_args"]
    for sources in (options["train"], options["val"]):
        for source in [sources] if isinstance(sources, str) else sources:
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows_of(source)).to_parquet(source)
