"""A new algorithm is a subclass: REINFORCE with the batch's mean reward as baseline, without critic and clipping.

It overrides one method, the one that turns rewards into advantages. From YAML it is reached by its dotted path:

    model:
      class_path: my_algorithms.MeanBaselineModule
      init_args: {actor: ..., minibatch_size: 64}

    python examples/03_new_algorithm.py
"""

import sys
from functools import partial

import lightning as L
import torch
from torch import Tensor

from lightning_rlhf import FromConfig, PromptDataModule, RLHFModule, Rollout
from lightning_rlhf.callbacks import RolloutLoop, complete
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.rewards.adapter import RewardFunction
from lightning_rlhf.rollout.transformers_engine import TransformersEngine


class MeanBaselineModule(RLHFModule):
    """The advantage of every token is its response's reward less the batch's mean reward."""

    def advantages_of(self, rollout: Rollout, token_rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) advantages, which are also what a critic would have been taught."""
        reward = token_rewards.sum(dim=1, keepdim=True)
        advantages = (reward - reward.mean()).expand_as(token_rewards) * rollout.response_mask
        return advantages, advantages


def distinct_letters(completions: list[str]) -> list[float]:
    """How many different letters were used, of four."""
    return [len(set(text)) / 4 for text in completions]


def main(run_directory: str = "runs/examples/new_algorithm") -> float:
    """Train, and return the mean reward of the last step."""
    L.seed_everything(0)
    architecture = {"model_type": "llama", "vocab_size": 8, "hidden_size": 32, "head_dim": 32, "num_attention_heads": 1}
    architecture |= {
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "initializer_range": 0.2,
    }
    module = MeanBaselineModule(
        actor=FromConfig(architecture), actor_optimizer=partial(torch.optim.AdamW, lr=3e-3), minibatch_size=64
    )
    data = PromptDataModule(
        train=InMemory([{"prompt": "ab"}] * 1280), tokenizer=CharacterTokenizer("abcd"), batch_size=64, max_tokens=8
    )
    loop = RolloutLoop([RewardFunction(distinct_letters)], engine=TransformersEngine(), max_response_tokens=6)
    trainer = L.Trainer(
        max_steps=20,
        callbacks=complete([loop]),
        default_root_dir=run_directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    return float(trainer.callback_metrics["reward/distinct_letters"])


if __name__ == "__main__":
    print(f"distinct letters, as a share of four: {main(*sys.argv[1:]):.2f}")
