"""Runs whose responses are sampled with top-p, top-k and min-p."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf.callbacks import RunCheckpoint
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.environments.conversation import Conversation, Limits
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.rollout.ahead import packed_completions, unpacked_completions
from lightning_rlhf.rollout.engine import finished
from lightning_rlhf.rollout.generation import PendingCompletions
from lightning_rlhf.rollout.sampler import Sampling
from lightning_rlhf.rollout.source import StepRequests
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import AllowedTokens, Completion, TokenPrompt
from tests.callbacks.test_staleness import Interrupt
from tests.environments import worlds
from tests.stand_ins import prompt_batch

LOOP = {
    "check_rows": 4, "max_logprob_diff": 1e-4, "group_size": 4, "temperature": 1.3, "max_response_tokens": 5,
    "top_p": 0.8, "top_k": 6, "min_p": 0.02,
}  # fmt: skip
CORRECTION = {"correction": RolloutCorrection(level="token")}


class Seen(Callback):
    """Keeps the experience of each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.steps.append(pl_module.last_step.experience)


class Silent(TransformersEngine):
    """Does not return which tokens were allowed, as vLLM on a CPU."""

    def request(self, prompts, sampling, seeds):
        return finished(
            [replace(future.result(), allowed=None) for future in super().request(prompts, sampling, seeds)]
        )


def trained(run, engine, steps=3, loop=(), callbacks=(), resume=None, trainer=(), **options):
    seen = Seen()
    trainer = {"max_steps": steps, "max_epochs": -1, "enable_checkpointing": bool(callbacks), **dict(trainer)}
    made = run(loop={"engine": engine, **LOOP, **dict(loop)}, trainer=trainer, callbacks=[seen, *callbacks], **options)
    return made.fit(ckpt_path=resume), seen.steps


@pytest.mark.parametrize("engine", [TransformersEngine, Silent])
def test_engine_and_actor_agree_over_the_allowed_tokens(run, engine):
    done, steps = trained(run, engine())
    assert len(steps) == 3
    for experience in steps:
        rollout = experience.rollout
        gap = (experience.old_logprobs - rollout.rollout_logprobs).abs()[rollout.response_mask]
        assert gap.max() < 1e-5
        counts = rollout.allowed.counts[rollout.response_mask]
        assert 1 <= counts.min() < counts.max() <= 6
    assert done.metrics["rollout/added_token_fraction"] == 0
    assert done.metrics["rollout/logprob_diff_max"] < 1e-5


def test_runs_are_the_same_whether_engine_or_actor_names_the_tokens(run):
    known, _ = trained(run, TransformersEngine())
    found, _ = trained(run, Silent())
    pairs = zip(known.module.actor.parameters(), found.module.actor.parameters(), strict=True)
    assert all(torch.allclose(first, second, atol=1e-6) for first, second in pairs)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_resumed_run_has_the_same_bits(run, tmp_path, max_staleness):
    def weights(folder, *callbacks, resume=None):
        options = {"loop": {"max_staleness": max_staleness}, "model": CORRECTION}
        callbacks = [RunCheckpoint(every_n_steps=2), *callbacks]
        root = {"default_root_dir": tmp_path / folder}
        done, steps = trained(run, TransformersEngine(), 6, callbacks=callbacks, resume=resume, trainer=root, **options)
        return [parameter.detach().clone() for parameter in done.module.actor.parameters()], len(steps)

    whole, _ = weights("whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        weights("cut", Interrupt(3))
    resumed, steps = weights("cut", resume=tmp_path / "cut/checkpoints/last.ckpt")
    assert steps == 4
    assert all(map(torch.equal, whole, resumed))


def test_checkpoint_keeps_the_allowed_tokens():
    tokens = AllowedTokens.of(torch.tensor([2, 0, 1]), torch.tensor([4, 5, 9]))
    completions = [Completion([4, 3, 9], [-1.0] * 3, "stop", 0, allowed=tokens).cut(length) for length in (3, 2)]
    completions.append(Completion([1], [-1.0], "stop", 0))
    batch = prompt_batch([7], [[4]], ["a"], {})
    pending = PendingCompletions(lambda: completions)
    ((_, restored),) = unpacked_completions(packed_completions(StepRequests(0, batch, Sampling(3, 1.0), pending, None)))
    assert restored == completions
    assert [each.allowed and each.allowed.ids.ids.tolist() for each in restored] == [[4, 5, 9], [4, 5], None]


def test_turns_of_a_conversation_keep_their_tokens_and_texts_have_none():
    conversation = Conversation(TokenPrompt([1]), Limits(3, 20))
    first, second = (AllowedTokens.of(torch.tensor([2, 1]), torch.tensor(ids)) for ids in ([3, 4, 5], [6, 7, 8]))
    conversation.add_turn(Completion([3, 5], [-1.0] * 2, "stop", 0, allowed=first))
    conversation.add_written([9, 9, 9])
    conversation.add_turn(Completion([6, 8], [-1.0] * 2, "stop", 0, allowed=second))
    conversation.add_written([9])
    conversation.end("done")
    allowed = conversation.completion.allowed
    assert allowed.counts.tolist() == [2, 1, 0, 0, 0, 2, 1]
    assert allowed.listed()[1].tolist() == [3, 4, 5, 6, 7, 8]
    branch = Conversation(TokenPrompt([1, 2]), Limits(3, 40))
    branch.append(conversation)
    branch.end("done")
    assert branch.completion.allowed.counts.tolist() == [0, *allowed.counts.tolist()]
    unknown = Conversation(TokenPrompt([1]), Limits(3, 20))
    unknown.add_turn(Completion([3, 5], [-1.0] * 2, "stop", 0))
    unknown.add_written([9])
    unknown.add_turn(Completion([6, 8], [-1.0] * 2, "stop", 0, allowed=second))
    unknown.end("done")
    assert unknown.completion.allowed is None


@pytest.mark.parametrize("engine", [TransformersEngine, Silent])
def test_conversations(run, engine):
    environment = EnvironmentSettings(worlds.Echo, bridge="plain", max_turns=2, max_turn_tokens=3)
    _, steps = trained(run, engine(), loop={"environment": environment, "rewards": [], "max_response_tokens": 12})
    for experience in steps:
        rollout = experience.rollout
        real = torch.arange(rollout.response_ids.shape[1]) < rollout.response_lengths.unsqueeze(1)
        assert (real & ~rollout.response_mask).any()
        assert not rollout.allowed.counts[~rollout.response_mask].any()
        assert rollout.allowed.counts[rollout.response_mask].all()
        assert (experience.old_logprobs - rollout.rollout_logprobs).abs()[rollout.response_mask].max() < 1e-5


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"min_p": 2.0}, r"min_p must lie in \[0, 1\], got 2.0"),
    ],
)
def test_invalid_limits_are_rejected(run, option, message):
    with pytest.raises(ValueError, match=message):
        run(loop=option)
