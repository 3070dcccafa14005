"""Helpers for tests of real engines: a small model, pushing its weights, and the trainer's log-probabilities."""

import torch

from lightning_rlhf.batching.sequences import join
from lightning_rlhf.models.loading import FromConfig, save_architecture
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.engine import EngineSetup
from tests.stand_ins import Response, rollout_of

MAX_TOKENS = 200
END = 2
ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
}


def source_of(seed=0, **changes):
    return FromConfig({**ARCHITECTURE, **changes}, seed=seed)


def setup_of(source, directory):
    save_architecture(source, directory)
    return EngineSetup(directory, source.dtype or "float32", MAX_TOKENS, directory / "engine.log")


def pushed(engine, source, version=0):
    """Push the model of a source to the engine and return it."""
    actor = source.causal().eval()
    engine.update_weights(parameters_of(actor), version)
    return actor


def parameters_of(actor):
    return whole_tensors(actor.lm)


def prompts_of(count, longest=40, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(3, ARCHITECTURE["vocab_size"], (length,), generator=draw).tolist() for length in lengths]


@torch.no_grad()
def largest_gap(actor, prompts, completions, temperature=1.0):
    """Return the largest difference of log-probabilities of sampled tokens between engine and trainer."""
    rows = [Response(prompt, answer.token_ids) for prompt, answer in zip(prompts, completions, strict=True)]
    rollout = rollout_of(rows)
    input_ids, index = join(rollout)
    logprobs = actor(input_ids, index, rollout.response_ids, rollout.response_mask, temperature).logprobs
    theirs = torch.nn.utils.rnn.pad_sequence([torch.tensor(c.logprobs) for c in completions], batch_first=True)
    return (logprobs - theirs).abs().max().item()


@torch.no_grad()
def greedy(actor, prompt, count):
    """Return the most likely tokens of the trainer's model, computed one after the other without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(actor.lm(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
