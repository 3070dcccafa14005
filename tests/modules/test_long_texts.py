"""Texts of thousands of tokens have the log-probs and gradients of plain transformers, in bounded memory."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rlhf import FromConfig, GRPOModule, SFTModule
from lightning_rlhf.functional.logprobs import chunk_bytes_on, keep_bytes_on
from lightning_rlhf.modules.texts import text_scores
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.types import SequenceBatch
from tests.helpers import assert_close
from tests.stand_ins import Response, fit, rollout_of

VOCABULARY = 8000
ARCHITECTURE = {
    "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 8192,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPT, RESPONSES = 5000, (1000, 1000, 700, 1000)
SGD = partial(torch.optim.SGD, lr=0.0)  # the weights stay


class Gradients(Callback):
    """Stores the gradients of the actor's only update."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.result = {name: p.grad.clone() for name, p in pl_module.actor.named_parameters()}


class LargestTensor(TorchDispatchMode):
    """Stores the size in bytes of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        sizes = [each.untyped_storage().nbytes() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.size = max([self.size, *sizes])
        return result


def source(**options):
    return FromConfig({**ARCHITECTURE, **options}, seed=3)


def tokens(count, seed):
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def plain_logprobs(lm, ids):
    """Return (L - 1,) log-probs of the tokens of a text, computed by transformers."""
    logits = lm(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)


def train(module, batch):
    """Take one step; return the gradients of the update."""
    gradients, largest = Gradients(), LargestTensor()
    with largest:
        fit(module, [batch], callbacks=[gradients])
    assert module.layout.packed
    # All logits of a text of 6,000 tokens would have 192 MB; the head keeps probabilities of some tokens.
    assert chunk_bytes_on("cpu") <= largest.size <= keep_bytes_on("cpu")
    return gradients.result


def assert_equal_gradients(ours, plain):
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, rtol=0, atol=1e-5 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1}])
def test_sft_update_on_5000_tokens_equals_plain_transformers(options):
    texts = [tokens(5000, 0), tokens(300, 1)]
    batch = SequenceBatch(
        torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
        torch.tensor([len(text) for text in texts]),
        torch.stack([(torch.arange(5000) < len(text)) & (torch.arange(5000) > 0) for text in texts]),
    )
    module = SFTModule(source(**options), optimizer=SGD, micro_batch_tokens=2048, max_grad_norm=None)
    gradients = train(module, batch)
    with torch.no_grad():
        (ours, _, _), _ = text_scores(module, "actor", batch)
    plain = source(attn_implementation="sdpa", **options).causal()
    expected = [plain_logprobs(plain.lm, text) for text in texts]
    (-sum(each.sum() for each in expected) / sum(map(len, expected))).backward()
    for row, each in zip(ours, expected, strict=True):
        assert_close(row[: len(each)], each.detach(), atol=3e-6)
    assert_equal_gradients(gradients, plain)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2048, 7000, 10000])
def test_grpo_update_on_6000_tokens_equals_plain_transformers(budget):
    prompt = tokens(PROMPT, 0).tolist()
    rows = [Response(prompt, tokens(size, 5 + i).tolist(), reward=i % 3) for i, size in enumerate(RESPONSES)]
    rollout = rollout_of(rows)
    rollout.group[:] = 0
    options = {"minibatch_size": 4, "kl_loss": KLTerm(), "max_grad_norm": None}
    module = GRPOModule(source(), optimizer=SGD, micro_batch_tokens=budget, **options)
    gradients = train(module, rollout)
    plain, experience = source(attn_implementation="sdpa").causal(), module.last_step.experience
    for number, row in enumerate(rows):
        logprobs = plain_logprobs(plain.lm, torch.tensor(row.prompt + row.tokens))[PROMPT - 1 :]
        ours, advantages = (
            each[number, : len(row.tokens)] for each in (experience.old_logprobs, experience.advantages)
        )
        assert_close(ours, logprobs.detach(), atol=3e-6)
        (-(advantages * logprobs).mean() / len(rows)).backward()
    assert_equal_gradients(gradients, plain)
