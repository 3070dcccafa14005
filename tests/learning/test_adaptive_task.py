"""A task on which rows by their rewards learn more from the same number of tokens: most rows teach nothing.

Of 48 prompts, the policy answers 20 always as asked, 20 can never be answered, and of 8 it does not know which of two
answers is right. A run without a sampler reads these 8 in a sixth of its groups.
"""

from functools import partial

import pytest
import torch
from lightning import seed_everything
from torch.nn import functional

from lightning_rlhf import GRPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.samplers.adaptive import Adaptive
from lightning_rlhf.extras.samplers.row_weights import Learnability, Pools
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests import figures
from tests.rollout.engines import ARCHITECTURE
from tests.stand_ins import quiet_trainer

LETTERS = "abcdefghijklmnop"
TOKENIZER = CharacterTokenizer(LETTERS + "vxyz")
PROMPTS = [first + second for first in LETTERS[:6] for second in LETTERS[6:14]]
EASY, IMPOSSIBLE, USEFUL = PROMPTS[:20], PROMPTS[20:40], PROMPTS[40:]
pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.timeout(900)]


def answer_to(prompt):
    if prompt in EASY:
        return "x"
    return "v" if prompt in IMPOSSIBLE else "yz"[USEFUL.index(prompt) % 2]  # v is never sampled


ROWS = [{"prompt": prompt, "answer": answer_to(prompt)} for prompt in PROMPTS]


def right(completions, answer):
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The directory of a model that answers x, or y and z equally often where it does not know."""
    tokenizer, directory = TOKENIZER.load(), tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    model = FromConfig({**ARCHITECTURE, "vocab_size": len(tokenizer), "initializer_range": 0.05}).causal().lm
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = [p + e for p in PROMPTS for e in ("yz" if p in USEFUL else "xx")]
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts])
    for _ in range(300):
        logits = model(ids).logits[:, 1:-1]
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def learn(start, directory, seed, sampler=None, steps=24):
    """Return the mean reward of sampled responses to the rows that teach something, and the trained tokens."""
    loop = RolloutLoop(
        [RewardFunction(right)], TransformersEngine(), group_size=8, max_response_tokens=2, val_samples=16,
        val_metric="right",
    )  # fmt: skip
    module = GRPOModule(str(start), optimizer=partial(torch.optim.AdamW, lr=1e-3), minibatch_size=64)
    seed_everything(seed)
    val = InMemory([row for row in ROWS if row["prompt"] in USEFUL])
    data = PromptDataModule(
        InMemory(ROWS), TOKENIZER, val=val, batch_size=8, val_batch_size=8, max_tokens=4, sampler=sampler
    )
    trainer = quiet_trainer(
        default_root_dir=directory, callbacks=[loop], max_steps=steps, max_epochs=-1, limit_val_batches=1.0
    )
    trainer.fit(module, datamodule=data)
    return float(trainer.callback_metrics["val/right_sampled"])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rows_by_their_rewards_teach_more_with_the_same_responses(start, tmp_path, seed):
    plain = learn(start, tmp_path / "plain", seed)
    pools = learn(start, tmp_path / "pools", seed, Adaptive([Pools(easy=0.05, impossible=0.05)]))
    variance = learn(start, tmp_path / "learnability", seed, Adaptive([Learnability()]))
    for name, value in {"plain": plain, "Pools": pools, "Learnability": variance}.items():
        figures.record(name, value)
    assert pools > plain + 0.1
