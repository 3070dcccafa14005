"""Train with PPO from Python, without the command line: a module, data, a callback, a Trainer.

The policy starts from random weights and is rewarded for writing the letter `a`. Runs on a CPU in half a minute:

    python examples/01_ppo_from_python.py
"""

import sys
from functools import partial

import lightning as L
import torch

from lightning_rlhf import FromConfig, PPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop, complete
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine


def share_of_a(completions: list[str]) -> list[float]:
    """Return the fraction of letters that are `a`."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def main(run_directory: str = "runs/examples/ppo_from_python") -> float:
    """Train, and return the mean reward of the last step."""
    L.seed_everything(0)
    tiny = FromConfig(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 32,
            "head_dim": 32,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
        }
    )
    module = PPOModule(
        actor=tiny,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        critic_optimizer=partial(torch.optim.AdamW, lr=3e-3),
        kl_reward=KLTerm(coef=0.01),
        update_epochs=2,
        minibatch_size=32,
    )
    data = PromptDataModule(
        train=InMemory([{"prompt": "abc"}] * 640), tokenizer=CharacterTokenizer("abcd"), batch_size=64, max_tokens=8
    )
    loop = RolloutLoop(
        rewards=[RewardFunction(share_of_a)],
        engine=TransformersEngine(),  # leave it out, and vLLM generates where it is installed
        max_response_tokens=8,
    )
    trainer = L.Trainer(
        max_steps=10,
        callbacks=complete([loop]),
        default_root_dir=run_directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    return float(trainer.callback_metrics["reward/share_of_a"])


if __name__ == "__main__":
    print(f"fraction of the letter a: {main(*sys.argv[1:]):.2f}")
