"""Preferences teach the addition task: DPO, IPO and KTO from given texts, online DPO from generated ones."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.tasks.addition import Problems, exact
from tests.learning.test_algorithms import fit

# Least fraction of correct answers, sampled and greedy: 0.04 and 0.03 below the worse of two seeds, which are in
# configs/README.md. Before, they are about 0.51 and 0.27.
BOUNDS = {
    "dpo": (0.72, 0.84),
    "ipo": (0.74, 0.94),
    "kto": (0.70, 0.78),
    "simpo": (0.86, 0.95),
    "orpo": (0.94, 0.95),
    "online_dpo": (0.91, 0.95),
}
pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.timeout(1200)]


@torch.no_grad()
def right_answers(export, sampled):
    """Return the fraction of correct answers to 512 held-out problems, greedy or sampled at temperature 1."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    rows = [row for _, row in Problems(512, held_out=True).rows()]
    ids = torch.tensor([tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows])
    torch.manual_seed(0)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=sampled, top_k=0)
    answers = [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in output]
    finished = [bool((row == tokenizer.eos_token_id).any()) for row in output[:, ids.shape[1] :]]
    return sum(exact(answers, [row["answer"] for row in rows], finished)) / len(rows)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A directory with the supervised model."""
    directory = tmp_path_factory.mktemp("preferences")
    fit(directory, "quickstart/sft")
    return directory


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_most_answers_are_right_after_training(start, name):
    fit(start, f"preferences/{name}")
    export = start / f"runs/preferences/{name}/export"
    sampled, greedy = BOUNDS[name]
    assert right_answers(export, sampled=True) >= sampled
    assert right_answers(export, sampled=False) >= greedy


def test_initial_model_is_often_wrong(start):
    export = start / "runs/quickstart/sft/export"
    assert right_answers(export, sampled=True) <= 0.6
    assert right_answers(export, sampled=False) <= 0.45
