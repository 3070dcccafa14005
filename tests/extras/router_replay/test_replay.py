"""Runs whose actor uses the engine's experts: what they compute, log, survive and reject."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf.callbacks import RunCheckpoint
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.environments.conversation import Conversation, Limits
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.router_replay.replay import RouterReplay, expert_loads, max_violation
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.rollout.ahead import packed_completions, unpacked_completions
from lightning_rlhf.rollout.engine import finished
from lightning_rlhf.rollout.generation import PendingCompletions
from lightning_rlhf.rollout.given_responses import GivenResponses
from lightning_rlhf.rollout.sampler import Sampling
from lightning_rlhf.rollout.source import StepRequests
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import Completion, RoutedExperts, TokenPrompt
from tests.callbacks.test_staleness import Interrupt
from tests.environments import worlds
from tests.models.architectures import tiny
from tests.stand_ins import TINY_LLAMA, ScriptedEngine, TinyModel, prompt_batch

MOE = {**tiny("qwen3_moe"), **{name: TINY_LLAMA[name] for name in ("vocab_size", "max_position_embeddings")}}
LOOP = {"check_rows": 0, "max_logprob_diff": 30.0, "group_size": 4, "max_response_tokens": 5}


@dataclass(frozen=True)
class Mixture(TinyModel):
    """A tiny mixture of experts."""

    architecture: dict = field(default_factory=lambda: dict(MOE))


class Rounded(TransformersEngine):
    """Has routers with less precision than the actor's, so that some of them choose other experts."""

    def update_weights(self, parameters, version):
        rounded = (
            (name, (tensor * 16).round() / 16 if "gate.weight" in name else tensor) for name, tensor in parameters
        )
        super().update_weights(rounded, version)


class Silent(TransformersEngine):
    """Returns no experts although it was asked to."""

    def request(self, prompts, sampling, seeds):
        return finished(
            [replace(future.result(), experts=None) for future in super().request(prompts, sampling, seeds)]
        )


class Seen(Callback):
    """Keeps the experience of each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.steps.append(pl_module.last_step.experience)


def trained(run, engine, callbacks=(), steps=3, loop=(), resume=None, model=(), trainer=()):
    seen = Seen()
    made = run(
        loop={"engine": engine, **LOOP, **dict(loop)},
        model={"actor": Mixture(), "minibatch_size": 8, "update_epochs": 1, **dict(model)},
        trainer={"max_steps": steps, "max_epochs": -1, "enable_checkpointing": bool(callbacks[1:]), **dict(trainer)},
        callbacks=[seen, *callbacks],
    )
    return made.fit(ckpt_path=resume), seen.steps


def gap_of(steps):
    experience = steps[0]
    rollout = experience.rollout
    return (experience.old_logprobs - rollout.rollout_logprobs).abs()[rollout.response_mask].mean()


def test_actor_with_the_experts_of_its_engine_differs_less_from_it(run):
    plain, without = trained(run, Rounded())
    replayed, with_replay = trained(run, Rounded(), [RouterReplay()])
    assert "router/replaced_fraction" not in plain.metrics
    assert 0 < replayed.metrics["router/replaced_fraction"] < 0.3
    first = [steps[0].rollout for steps in (without, with_replay)]
    assert torch.equal(first[0].response_ids, first[1].response_ids)
    assert gap_of(with_replay) < 0.7 * gap_of(without)  # the rest are the weights of experts


def test_engine_with_the_same_weights_chooses_the_same_experts(run):
    plain, _ = trained(run, TransformersEngine())
    replayed, steps = trained(run, TransformersEngine(), [RouterReplay()])
    assert replayed.metrics["router/replaced_fraction"] == 0
    assert replayed.metrics["rollout/logprob_diff_max"] < 1e-5
    for name, value in plain.module.actor.state_dict().items():
        torch.testing.assert_close(replayed.module.actor.state_dict()[name], value, rtol=0, atol=1e-6)
    layers = {name for name in replayed.metrics if name.endswith("/max_violation")}
    assert layers == {"router/layer_0/max_violation", "router/layer_1/max_violation"}
    loads = expert_loads(steps[-1].rollout.experts, 4)
    tokens = steps[-1].rollout.total_lengths - 1
    assert loads.sum(dim=1).tolist() == [2 * int(tokens.sum())] * 2
    assert replayed.metrics["router/layer_1/max_violation"] == pytest.approx(max_violation(loads[1]))


def test_loads_and_violation_by_hand():
    rows = [torch.tensor([[[0, 1]], [[0, 2]]]), torch.tensor([[[0, -1]]]), None]
    loads = expert_loads(RoutedExperts.of(rows), 4)
    assert loads.tolist() == [[3, 1, 1, 0]]
    assert max_violation(loads[0]) == pytest.approx(3 / 1.25 - 1)
    assert max_violation(torch.tensor([2.0, 2.0])) == 0


def test_experts_by_position():
    rows = [torch.tensor([[[300, 1]], [[5, 2]]]), None, torch.tensor([[[0, 7]]])]
    experts = RoutedExperts.of(rows)
    assert experts.numbers.dtype == torch.uint8
    at = experts.at(torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 1, 2, 0, 0, 1]))
    assert at.squeeze(1).tolist() == [[300, 1], [5, 2], [-1, -1], [-1, -1], [0, 7], [-1, -1]]
    assert RoutedExperts.of([None, None]) is None
    two = experts[[2, 0]]
    assert two.at(torch.tensor([0, 1]), torch.tensor([0, 1])).squeeze(1).tolist() == [[0, 7], [5, 2]]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_resumed_run_has_the_same_bits(run, tmp_path, max_staleness):
    def weights(folder, *callbacks, resume=None):
        done, steps = trained(
            run,
            Rounded(),
            [RouterReplay(), RunCheckpoint(every_n_steps=2), *callbacks],
            5,
            loop={"max_staleness": max_staleness},
            resume=resume,
            model={"correction": RolloutCorrection(level="token")},
            trainer={"default_root_dir": tmp_path / folder},
        )
        return [parameter.detach().clone() for parameter in done.module.actor.parameters()], len(steps)

    whole, _ = weights("whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        weights("cut", Interrupt(3))
    resumed, steps = weights("cut", resume=tmp_path / "cut/checkpoints/last.ckpt")
    assert steps == 3
    assert all(map(torch.equal, whole, resumed))


def test_checkpoint_keeps_the_experts():
    experts = torch.arange(8, dtype=torch.int16).view(4, 1, 2)
    completions = [Completion([4, 3, 9], [-1.0] * 3, "stop", 0, experts=experts).cut(length) for length in (3, 2)]
    completions.append(Completion([1], [-1.0], "stop", 0))
    pending = PendingCompletions(lambda: completions)
    requests = StepRequests(0, prompt_batch([7], [[4, 5]], ["a"], {}), Sampling(3, 1.0), pending, None)
    ((_, restored),) = unpacked_completions(packed_completions(requests))
    assert torch.equal(restored[0].experts, experts)
    assert torch.equal(restored[1].experts, experts[:3])
    assert restored[2].experts is None


def test_turns_of_a_conversation_keep_their_experts_and_so_do_branches():
    def experts(count, first):
        return torch.arange(first, first + count, dtype=torch.int16).view(-1, 1, 1)

    conversation = Conversation(TokenPrompt([1, 2]), Limits(3, 20))
    conversation.add_turn(Completion([3, 5], [-1.0] * 2, "stop", 0, experts=experts(3, 100)))
    conversation.add_written([9, 9])
    conversation.add_turn(Completion([6, 8], [-1.0] * 2, "stop", 0, experts=experts(7, 0)))
    conversation.add_written([9])
    branch = Conversation(TokenPrompt([1]), Limits(3, 20))
    branch.add_turn(Completion([7, 7], [-1.0] * 2, "stop", 0, experts=experts(2, 50)))
    branch.end("done")
    start = conversation.append(branch)
    conversation.end("done")
    assert start == 7
    assert conversation.completion.experts.flatten().tolist() == [100, 101, 102, 3, 4, 5, 6, -1, -1, 50, 51]
    assert len(conversation.completion.token_ids) == 10  # with two tokens of the prompt, the last one has no experts


def test_every_token_of_a_conversation_but_the_last_has_experts(run):
    environment = EnvironmentSettings(worlds.Echo, bridge="plain", max_turns=2, max_turn_tokens=3)
    loop = {"environment": environment, "rewards": [], "max_response_tokens": 12}
    done, steps = trained(run, TransformersEngine(), [RouterReplay()], loop=loop)
    assert done.metrics["router/replaced_fraction"] == 0
    for experience in steps:
        rollout = experience.rollout
        rows, places = torch.arange(len(rollout)), rollout.total_lengths - 2
        assert (rollout.experts.at(rows, places) >= 0).all()
        assert (rollout.experts.at(rows, places + 1) < 0).all()
        assert gap_of([experience]) < 1e-5


def test_adapters_keep_the_reference_without_experts(run):
    lora = LoRA(rank=2, alpha=4, target_modules=["q_proj", "v_proj"])
    done, _ = trained(run, TransformersEngine(), [RouterReplay()], model={"actor": Mixture(lora=lora)})
    assert done.metrics["router/replaced_fraction"] == 0


def test_responses_from_the_data_are_rejected(run):
    loop = {"given_responses": GivenResponses()}
    with pytest.raises(UsageError, match="RouterReplay cannot be combined with given_responses"):
        RouterReplay().setup(run(loop=loop, model={"actor": Mixture()}).trainer, run().module, "fit")


def test_dense_actors_are_rejected_before_the_engine_starts(run):
    with pytest.raises(UsageError, match="'llama' has None experts"):
        trained(run, TransformersEngine(), [RouterReplay()], model={"actor": TinyModel()})


def test_engines_without_experts_are_rejected(run):
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="on GPUs only: use TransformersEngine"):
            VLLMEngine().return_experts()
    made = run(model={"actor": Mixture()}, callbacks=[RouterReplay()])
    assert isinstance(made.engine, ScriptedEngine)
    with pytest.raises(UsageError, match="ScriptedEngine does not return the experts"):
        made.fit()
    with pytest.raises(RunError, match="the engine returned no experts"):
        trained(run, Silent(), [RouterReplay()])
