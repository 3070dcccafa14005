"""GRPO in one file: the whole loop in plain torch, with this library's objectives and without a Trainer.

Read this page first. Each step samples a group of responses to each prompt, scores them, compares each with the others
of its group, and takes a few optimizer steps towards the better ones. A run with `lightning-rlhf fit` does the same;
the comments say where. What it has in addition: vLLM in place of `generate`, a KL to a reference model, critics,
packing of texts without padding, several GPUs, checkpoints that resume to the bit, and logs.

The task is small enough for a laptop's CPU and a model of random weights: the prompt names a letter, and the reward is
the fraction of the response that is this letter.

    python examples/00_one_file.py
"""

import sys

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.functional.logprobs import TokenScores, token_scores
from lightning_rlhf.functional.masked import rewards_at_tokens
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean
from lightning_rlhf.objectives.base import AdvantageInputs
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss

LETTERS = "abcd"
GROUP = 8  # responses to each prompt
LENGTH = 6  # tokens of a response, at most
MINIBATCHES = 2  # optimizer steps on the responses of a step


# -- the three parts of the algorithm ---------------------------------------------------------------------------------
# Each is an object that you can replace: see lightning_rlhf/objectives/ and examples/03_new_algorithm.py.

ADVANTAGES = GRPO()  # (reward - mean of the group) / standard deviation of the group
POLICY_LOSS = ClippedPolicyLoss(clip_range=0.2)  # PPO's clipped surrogate
AGGREGATION = SequenceMeanTokenMean()  # the mean over responses of the mean over their tokens


# -- 1. sample: lightning_rlhf/rollout/source.py has an engine do this ------------------------------------------------


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Sample one response to each prompt, token by token.

    Args:
        model: a language model of transformers.
        prompts: (B, P) tokens; here all prompts are equally long, so there is no padding.
        end: token that ends a response.

    Returns:
        responses: (B, T) tokens, with `end` repeated after the first one.
        mask: (B, T) bool, True for tokens that were sampled, the first `end` included.
    """
    responses = prompts[:, :0]
    mask = torch.zeros_like(responses, dtype=torch.bool)
    goes_on = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(LENGTH):
        logits = model(torch.cat([prompts, responses], dim=1)).logits[:, -1]
        tokens = torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1).where(goes_on, end)
        responses = torch.cat([responses, tokens.unsqueeze(1)], dim=1)
        mask = torch.cat([mask, goes_on.unsqueeze(1)], dim=1)
        goes_on = goes_on & (tokens != end)
    return responses, mask


# -- 2. score: any function of the texts; RolloutLoop(rewards=[...]) calls yours --------------------------------------


def fraction_of_letter(prompts: list[str], completions: list[str]) -> list[float]:
    """Return the fraction of each completion that is the letter of its prompt."""
    return [text.count(letter) / LENGTH for letter, text in zip(prompts, completions, strict=True)]


# -- 3. compare: RLHFModule.evaluate ----------------------------------------------------------------------------------


def scores_of(model: torch.nn.Module, prompts: Tensor, responses: Tensor) -> TokenScores:
    """Return log-probabilities and entropies of the responses' tokens, (B, T) each."""
    logits = model(torch.cat([prompts, responses], dim=1)).logits
    before = logits[:, prompts.shape[1] - 1 : -1]  # the logits at a position are those of the next token
    flat = token_scores(before.flatten(0, 1), responses.flatten())
    return TokenScores(flat.logprobs.view_as(responses), flat.entropy.view_as(responses))


def advantages_of(reward: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Return the (B, T) advantage of each token.

    Args:
        reward: (B,) reward of each response.
        mask: (B, T) bool, the sampled tokens.
        group: (B,) number of each response's prompt.
    """
    advantages, _ = ADVANTAGES(AdvantageInputs(rewards_at_tokens(reward, mask), mask, group))
    return advantages


# -- 4. update: RLHFModule.policy_losses and RoleModule.update --------------------------------------------------------


def loss_of(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of a mini-batch.

    Its denominator is counted over the whole mini-batch. So it stays right if you divide the mini-batch into several
    forward passes or over several GPUs: add the sums, and divide once.
    """
    losses, _ = POLICY_LOSS(logprobs, old_logprobs, advantages, mask)
    return (losses * AGGREGATION.weights(mask)).sum() / AGGREGATION.denominator(mask)


# -- the loop: RLHFModule.training_step -------------------------------------------------------------------------------


def main(steps: int = 60) -> list[float]:
    """Train, print the mean reward of some steps, and return those of all."""
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer(LETTERS).load()
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=16,
            num_key_value_heads=2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    letters = [letter for letter in LETTERS * 2 for _ in range(GROUP)]  # eight prompts, and a group for each
    prompts = torch.tensor([tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in letters])
    group = torch.arange(len(letters)) // GROUP
    history = []
    for step in range(steps):
        responses, mask = sample(model, prompts, end=tokenizer.eos_token_id)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        reward = torch.tensor(fraction_of_letter(letters, texts))
        with torch.no_grad():
            old_logprobs = scores_of(model, prompts, responses).logprobs  # of the policy that sampled
        advantages = advantages_of(reward, mask, group)
        for rows in torch.randperm(len(letters)).chunk(MINIBATCHES):
            logprobs = scores_of(model, prompts[rows], responses[rows]).logprobs
            loss = loss_of(logprobs, old_logprobs[rows], advantages[rows], mask[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        history.append(reward.mean().item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3}: mean reward {history[-1]:.2f}, for example {letters[0]!r} -> {texts[0]!r}")
    return history


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
