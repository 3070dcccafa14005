"""One step of a recipe with vLLM, and the outputs of the engine and the actor after it."""

import copy

import torch
from lightning.pytorch import Callback

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.types import SamplingParams
from tests.cli.small_recipes import write_data
from tests.rollout.engines import greedy, largest_gap

PROMPTS = [[5], [6, 7, 8], [9, 10] * 8, list(range(4, 40))]
RECORDED = {}


class RecordAfterStep(Callback):
    """Syncs the new weights to the engine after a step, and records the outputs of the engine and of the actor."""

    def on_train_start(self, trainer, pl_module):
        self.before = copy.deepcopy(pl_module.actor)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (loop,) = (callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop))
        loop.parts.weights.sync(trainer.global_step)
        actor, before = pl_module.actor, dict(self.before.lm.named_parameters())
        sampled = generate(loop.running_engine, PROMPTS, SamplingParams(12), range(4))
        likeliest = generate(loop.running_engine, PROMPTS, SamplingParams(12, temperature=0), range(4))
        RECORDED.update(
            gap=largest_gap(actor, PROMPTS, sampled),
            gap_before=largest_gap(self.before, PROMPTS, sampled),
            engine=[list(completion.token_ids) for completion in likeliest],
            actor=[greedy(actor, prompt, 12) for prompt in PROMPTS],
            difference=loop.running_engine.first_difference(pl_module.role_strategy.iter_full_params("actor")),
            moved=[name for name, value in actor.lm.named_parameters() if not torch.equal(value, before[name])],
        )


def take_a_step(fit, config):
    """Take the only step of a run; assert that the engine then answers like the updated actor, not like the old one.

    Returns what was recorded, for example the names of the weights that moved.
    """
    config["trainer"]["callbacks"].append({"class_path": "tests.cli.after_the_step.RecordAfterStep"})
    write_data(config)
    RECORDED.clear()
    result = fit(config, "--trainer.fast_dev_run", "1")
    assert (result.code, result.err) == (0, "")
    assert RECORDED["engine"] == RECORDED["actor"]
    assert RECORDED["gap"] < 1e-4
    assert RECORDED["gap_before"] > 0.01
    return dict(RECORDED)
