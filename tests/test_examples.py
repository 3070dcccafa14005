"""Every example runs to its end and learns the task that its documentation describes."""

import copy
import json
import random
import re
import runpy
import string
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_rlhf import GRPOModule, PromptDataModule
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.rewards.rules import gsm8k_strict
from lightning_rlhf.rollout.engine import RolloutEngine
from tests.helpers import assert_close
from tests.stand_ins import VOCABULARY, Response, TinyModel, columns_of, fit, rollout_of

EXAMPLES = Path(__file__).parents[1] / "examples"
# Lightning's own words at every run from Python; the command line turns them off.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:.*module\(s\) in eval mode"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


def run(name, *arguments):
    return runpy.run_path(str(EXAMPLES / name))["main"](*arguments)


def test_every_example_is_tested():
    tested = {
        "00_one_file.py",
        "01_ppo_from_python.py",
        "02_custom_reward.py",
        "03_new_algorithm.py",
        "04_verl_data.py",
        "05_own_engine.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_one_file_learns_to_write_the_letter_of_the_prompt(capsys):
    history = run("00_one_file.py", 40)
    assert sum(history[:3]) / 3 < 0.3
    assert sum(history[-3:]) / 3 > 0.85
    assert len((EXAMPLES / "00_one_file.py").read_text().splitlines()) <= 250


def test_updates_of_the_one_file_are_those_of_the_module():
    """The second update has ratios other than 1; in the first, only the log-probabilities before it count."""
    one_file = runpy.run_path(str(EXAMPLES / "00_one_file.py"))
    draw = torch.Generator().manual_seed(3)
    rows = [
        Response([5], torch.randint(0, VOCABULARY, (length,), generator=draw).tolist(), reward)
        for length, reward in zip((4, 6, 1, 3, 2, 6, 5, 6), (1.0, 0.0, 0.5, 0.5, 0.0, 0.0, 2.0, -1.0), strict=True)
    ]
    rollout = replace(rollout_of(rows), group=torch.arange(8) // 4)
    module = GRPOModule(
        TinyModel(),
        kl_loss=KLTerm(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        max_grad_norm=None,
        minibatch_size=8,
        update_epochs=2,
    )
    module.configure_model()
    model = copy.deepcopy(module.actor.lm)
    fit(module, [rollout])

    prompts, responses, mask = rollout.prompt_ids, rollout.response_ids, rollout.response_mask
    with torch.no_grad():
        old = one_file["scores_of"](model, prompts, responses).logprobs
    advantages = one_file["advantages_of"](rollout.reward, mask, rollout.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        logprobs = one_file["scores_of"](model, prompts, responses).logprobs
        optimizer.zero_grad()
        one_file["loss_of"](logprobs, old, advantages, mask).backward()
        optimizer.step()
    assert (logprobs - old)[mask].abs().max() > 1e-3
    for ours, theirs, start in zip(model.parameters(), module.actor.lm.parameters(), before, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-6)
        assert (ours - start).abs().max() > 1e-5


@pytest.mark.slow
def test_ppo_from_python_learns_to_write_the_letter(tmp_path):
    assert run("01_ppo_from_python.py", str(tmp_path)) > 0.9
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_custom_reward_receives_columns_and_raises_without_them(capsys):
    assert run("02_custom_reward.py")[:2] == pytest.approx([1.0, 0.8])
    assert "did you mean 'answer'?" in capsys.readouterr().out


@pytest.mark.slow
def test_new_algorithm_learns(tmp_path):
    assert run("03_new_algorithm.py", str(tmp_path)) > 0.85


def test_verl_data_are_read_by_a_recipe(tmp_path, capsys):
    row = {"question": "Compute 600 + 634.", "answer": "600 + 634 is 1,234.\n#### 1,234"}
    for split, count in (("train", 3), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text(count * (json.dumps(row) + "\n"))
    assert run("04_verl_data.py", str(tmp_path), str(tmp_path / "verl")) == {"train": 3, "test": 2}
    tokenizer = CharacterTokenizer(string.printable).load()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = PromptDataModule(str(tmp_path / "verl/train.parquet"), str(tmp_path / "tokenizer"), batch_size=3)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch.prompts[0].text.startswith("Compute 600 + 634. Let's think")
    assert gsm8k_strict(["so #### 1234", "#### 1,234", "#### 634"], columns_of(batch)["ground_truth"]) == [1, 1, 0]
    assert columns_of(batch)["data_source"] == ["openai/gsm8k"] * 3


@pytest.mark.slow
def test_custom_engine_generates_the_rollouts_of_a_run(tmp_path, monkeypatch):
    engine = runpy.run_path(str(EXAMPLES / "05_own_engine.py"))["PlainEngine"]
    monkeypatch.setattr("lightning_rlhf.rollout.transformers.TransformersEngine", engine)
    assert run("01_ppo_from_python.py", str(tmp_path)) > 0.9  # its log-probs are compared with the actor's in each step
    assert isinstance(engine(), RolloutEngine)


def test_tools_return_the_answers_of_the_chat_model_questions(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "smollm2/arithmetic.py"))
    example["main"](str(tmp_path))
    train, val = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "val")
    )
    assert (len(train), len(val)) == (2048, 128)
    signs = {"plus": "add", "minus": "subtract", "times": "multiply", "Add": "add", "Multiply": "multiply"}
    problems = set()
    for row in train + val:
        question = row["prompt"][-1]["content"]
        a, b = (int(number) for number in re.findall(r"\d+", question))
        if question.startswith("Subtract"):
            name, a, b = "subtract", b, a
        else:
            (name,) = (signs[word] for word in question.split() if word in signs)
        assert row["answer"] == str(example[name](a, b))
        assert row["direct"][-1] == row["prompt"][-1]
        problems.add((name, a, b))
    assert len(problems) == 2048 + 128  # no held-out problem is trained on


def test_reward_of_the_chat_model_reads_the_last_number_of_a_finished_answer():
    right = runpy.run_path(str(EXAMPLES / "smollm2/arithmetic.py"))["right"]
    answers = ["1 + 2 = 3", "3 is 1 + 2", "The answer is 3,000.", "3", "", "13"]
    assert right(answers, ["3", "3", "3000", "3", "3", "3"], [True, True, True, False, True, True]) == [
        1,
        0,
        1,
        0,
        0,
        0,
    ]


def test_teacher_of_word_problems_has_the_worked_examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "smollm2"))
    module = runpy.run_path(str(EXAMPLES / "smollm2/word_problems.py"))
    (row,) = module["rows"](1, random.Random(1), set())
    assert len(row["question"]) == 2
    assert module["with_examples"]([row["question"]]) == [row["prompt"]]
