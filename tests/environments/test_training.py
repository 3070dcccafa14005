"""Training on conversations: rollouts, rewards at turns, metrics, checkpoints."""

import copy
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from lightning_rlhf import GRPOModule, PPOModule, PromptDataModule, RLHFModule
from lightning_rlhf.callbacks import DynamicSampling, RolloutLog, RolloutLoop
from lightning_rlhf.callbacks.loop.rollout_rows import segments_of
from lightning_rlhf.callbacks.survival.run_settings import changes, rollout_settings
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import Environment, EnvironmentSettings, MarkedToolCalls, Reply, Tools
from lightning_rlhf.environments.conversation import StopReason
from lightning_rlhf.functional.masked import rewards_at_tokens
from lightning_rlhf.objectives.base import AdvantageEstimator
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.ahead import packed_completions, unpacked_completions
from lightning_rlhf.rollout.sampler import Sampling
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import Completion, ConversationRecord, ConversationTokens, Prompt
from tests.environments import worlds
from tests.stand_ins import Response, TinyModel, fit, quiet_trainer, rollout_of

LETTERS = CharacterTokenizer("abcdefg", chat=True)
SGD = partial(torch.optim.SGD, lr=0.1)


def guessing(**options):
    """Return settings of an environment whose conversations have up to three short turns."""
    return EnvironmentSettings(
        worlds.Guess, **{"max_turns": 3, "max_turn_tokens": 3, "timeout_s": None, "bridge": "plain", **options}
    )


class Breaks(Environment):
    """Fails if a turn begins with a, b or c."""

    def step(self, text):
        if text[:1] in "abc":
            raise ValueError("broken")
        return Reply("a", reward=float(len(text)))


class CountsA(Environment):
    """Ends after the first turn; the reward is its number of letters a."""

    def step(self, text):
        return Reply(reward=float(text.count("a")), done=True)


def count_a(completions):
    return [float(text.count("a")) for text in completions]


def run(tmp_path, environment=None, rewards=(), module=GRPOModule, callbacks=(), steps=2, engine=None, **options):
    rows, val = InMemory([{"prompt": "abc"}, {"prompt": "ga"}] * 4), InMemory([{"prompt": "ab"}] * 2)
    data = PromptDataModule(rows, LETTERS, val=val, batch_size=2, max_tokens=8)
    arguments = {"actor": TinyModel(), "optimizer": SGD, "minibatch_size": 4}
    if module is PPOModule:
        arguments |= {"critic": TinyModel(seed=1), "critic_optimizer": SGD}
    module = module(**arguments)
    engine = engine or TransformersEngine()
    loop = RolloutLoop(list(rewards), engine, group_size=4, max_response_tokens=16, environment=environment, **options)
    trainer = quiet_trainer(callbacks=[loop, *callbacks], default_root_dir=tmp_path, max_steps=steps, max_epochs=-1)
    torch.manual_seed(0)
    trainer.fit(module, datamodule=data)
    return module, trainer


@pytest.mark.parametrize("module", [GRPOModule, PPOModule])
def test_policy_trains_only_on_its_own_tokens(tmp_path, module):
    module, _ = run(tmp_path, guessing(), module=module, callbacks=[RolloutLog()])
    experience = module.last_step.experience
    rollout = experience.rollout
    written = written_by_environment(rollout)
    assert written.any()
    for values in (rollout.rollout_logprobs, experience.advantages, rollout.policy_version, experience.token_rewards):
        assert not values[written].any()
    gap = (experience.old_logprobs - rollout.rollout_logprobs)[rollout.response_mask]
    assert gap.abs().max() < 1e-4
    assert torch.equal(rollout.reward, rollout.rewards["environment"])
    torch.testing.assert_close(experience.token_rewards.sum(1), rollout.reward)


def written_by_environment(rollout):
    """Return (B, T) which tokens of the responses the environment wrote."""
    in_response = torch.arange(rollout.response_ids.shape[1]) < rollout.response_lengths.unsqueeze(1)
    return in_response & ~rollout.response_mask


def test_metrics_count_turns_ends_and_written_tokens(tmp_path):
    module, trainer = run(tmp_path, guessing())
    rollout, metrics = module.last_step.experience.rollout, trainer.callback_metrics
    for prefix in ("", "val/"):
        ends = [float(metrics[f"{prefix}env/stop_{name}"]) for name in get_args(StopReason)]
        assert sum(ends) == pytest.approx(1.0)
        assert 1 <= float(metrics[f"{prefix}env/turns"]) <= 3
        assert 0 <= float(metrics[f"{prefix}env/written_fraction"]) < 1
    assert 1 < metrics["env/turns"] <= 3
    assert metrics["env/stop_truncated"] + metrics["env/stop_max_turns"] + metrics["env/stop_done"] == 1
    assert metrics["env/written_fraction"] == written_by_environment(rollout).sum() / rollout.response_lengths.sum()
    assert metrics["rollout/response_tokens"] == rollout.response_mask.sum()
    assert {"val/environment_greedy", "val/environment_sampled", "reward/environment"} <= metrics.keys()


@pytest.mark.slow
def test_environment_of_one_turn_gives_the_same_result_as_no_environment(tmp_path):
    settings = EnvironmentSettings(CountsA, timeout_s=None, bridge="plain")
    with_one, _ = run(tmp_path / "one", settings)
    without, _ = run(tmp_path / "none", rewards=[RewardFunction(count_a)])
    rewards = with_one.last_step.experience.rollout.rewards["environment"]
    finished = ~with_one.last_step.experience.rollout.truncated  # the environment gets no truncated turn
    assert torch.equal(rewards[finished], without.last_step.experience.rollout.rewards["count_a"][finished])
    ids = [module.last_step.experience.rollout.response_ids for module in (with_one, without)]
    assert torch.equal(*ids)


def judged(completions, conversations, turns, environment_rewards, stop_reasons):
    for messages, text, count in zip(conversations, completions, turns, strict=True):
        turns_of_policy = messages[::2]  # messages begin after the prompt
        assert [message["role"] for message in turns_of_policy] == ["assistant"] * count
        assert messages[-1]["content"] == text
    assert set(stop_reasons) <= {"done", "max_turns", "truncated", "tokens", "fault"}
    return environment_rewards


def in_messages(completions):
    return [float(len(messages)) for messages in completions]


def test_reward_functions_get_the_whole_conversation(tmp_path):
    rewards = [RewardFunction(judged), RewardFunction(in_messages, weight=0.5, messages=True)]
    module, _ = run(tmp_path, guessing(weight=0.0), rewards)
    rollout = module.last_step.experience.rollout
    assert torch.equal(rollout.rewards["judged"], rollout.rewards["environment"])
    torch.testing.assert_close(rollout.reward, rollout.rewards["judged"] + 0.5 * rollout.rewards["in_messages"])
    assert not rollout.conversation.step_rewards.any()  # the weight is 0


def test_skipped_conversations_are_not_trained_on(tmp_path):
    settings = EnvironmentSettings(
        Breaks, max_turns=2, max_turn_tokens=3, timeout_s=None, bridge="plain", on_error="skip", max_error_rate=1.0
    )
    module, trainer = run(tmp_path, settings)
    rollout = module.last_step.experience.rollout
    assert 0 < rollout.included.sum() < len(rollout)
    assert not module.last_step.experience.mask[~rollout.included].any()
    assert trainer.callback_metrics["env/fault_error"] == (~rollout.included).float().mean()


def one_each(completions):
    return [1.0 for _ in completions]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("on_error", ["zero", "end"])
def test_rewards_of_a_failed_conversation_are_zero_or_those_until_its_end(tmp_path, on_error):
    settings = EnvironmentSettings(
        Breaks, max_turns=3, max_turn_tokens=3, timeout_s=None, bridge="plain", on_error=on_error, max_error_rate=1.0,
        weight=0.0,
    )  # fmt: skip
    module, trainer = run(tmp_path, settings, rewards=[RewardFunction(one_each)], steps=1)
    rollout = module.last_step.experience.rollout
    values, counts = rollout.reward.unique(return_counts=True)
    failed = round(float(trainer.callback_metrics["env/fault_error"]) * len(rollout))
    assert 0 < failed < len(rollout)
    assert rollout.included.all()
    assert torch.equal(rollout.reward, rollout.rewards["one_each"])
    assert int(counts[values == 0].sum()) == (failed if on_error == "zero" else 0)


@pytest.mark.parametrize("reward", [None, "environment"])
def test_dynamic_sampling_compares_environment_rewards(tmp_path, reward):
    settings = EnvironmentSettings(worlds.Remembers, timeout_s=None, bridge="plain", max_turn_tokens=3)
    sampling = DynamicSampling(prompts_per_step=1, reward=reward)
    module, trainer = run(tmp_path, settings, dynamic_sampling=sampling)
    rollout = module.last_step.experience.rollout
    rewards = rollout.rewards["environment"][rollout.included]
    assert trainer.callback_metrics["rollout/filled_fraction"] == 0  # every prompt has contrast
    assert rewards.max() > rewards.min()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_asynchronous_conversations_use_the_weights_of_their_step(tmp_path, max_staleness):
    module, trainer = run(tmp_path, guessing(), steps=4, max_staleness=max_staleness)
    rollout = module.last_step.experience.rollout
    versions = rollout.policy_version[rollout.response_mask]
    assert versions.unique().tolist() == [3 - max_staleness]  # the last step has index 3
    assert trainer.callback_metrics["rollout/staleness_max"] == max_staleness


class LateTurns(TransformersEngine):
    """Returns each turn 0.3 s later, which is longer than a step, so that conversations last until the next push."""

    def request(self, prompts, sampling, seeds):
        turns = [future.result() for future in super().request(prompts, sampling, seeds)]
        futures = [Future() for _ in turns]
        for future, turn in zip(futures, turns, strict=True):
            threading.Timer(0.3, future.set_result, args=(turn,)).start()
        return futures


@pytest.mark.slow
def test_push_waits_for_earlier_conversations(tmp_path):
    module, _ = run(tmp_path, guessing(), steps=4, engine=LateTurns(), max_staleness=2, validate_at_ends=False)
    rollout = module.last_step.experience.rollout
    assert rollout.policy_version[rollout.response_mask].unique().tolist() == [3 - 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bridge": "template"}, "prompts of the data are plain text: set as_messages: true"),
        (
            {"bridge": "template", "tokenizer": CharacterTokenizer("abcdefg")},
            "no chat template: use one with a template",
        ),
        ({"rewards": [RewardFunction(count_a, name="environment")]}, "a reward cannot be called 'environment'"),
    ],
)
def test_invalid_settings_are_rejected_before_an_engine_starts(tmp_path, options, message):
    settings = EnvironmentSettings(CountsA, timeout_s=None, bridge=options.get("bridge", "plain"))
    data = PromptDataModule(
        InMemory([{"prompt": "ab"}] * 8), options.get("tokenizer", LETTERS), batch_size=2, max_tokens=8
    )
    module = GRPOModule(TinyModel(), optimizer=SGD, minibatch_size=8)
    loop = RolloutLoop(
        options.get("rewards", []), TransformersEngine(), group_size=4, max_response_tokens=16, environment=settings
    )
    trainer = quiet_trainer(callbacks=[loop], default_root_dir=tmp_path, max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, datamodule=data)


def test_turn_rewards_of_a_case_by_hand():
    reward, mask = torch.tensor([3.0, 1.0]), torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]).bool()
    steps = torch.tensor([[0.0, 2.0, 0, 0, 0], [0.0] * 5])
    expected = [[0.0, 2.0, 0, 1.0, 0], [1.0, 0, 0, 0, 0]]
    assert rewards_at_tokens(reward, mask, steps).tolist() == expected
    assert rewards_at_tokens(reward, mask).tolist() == [[0.0, 0, 0, 3.0, 0], [1.0, 0, 0, 0, 0]]


def test_conversations_are_restored_from_a_checkpoint():
    record = ConversationRecord(
        prompt_ids=[1, 2],
        messages=[{"role": "user", "content": "é"}],
        turn_ends=[1, 3],
        turn_rewards=[0.5, 1.0],
        stop="done",
        tool_calls=1,
        metrics={"x": 1.0},
        environment_s=0.25,
    )
    saved = Completion(
        token_ids=[5, 6, 7],
        logprobs=[-1.0, 0.0, -0.5],
        finish_reason="stop",
        policy_version=3,
        sampled=(True, False, True),
        conversation=record,
    )
    plain = Completion(token_ids=[5], logprobs=[-1.0], finish_reason="length", policy_version=3)
    request = SimpleNamespace(
        step=7,
        sampling=Sampling(2, 1.0),
        prompts=[Prompt([1], "a", index=4)],
        completions=lambda: [saved, plain],
    )
    ((key, completions),) = unpacked_completions(packed_completions(request))
    assert key == (7, 2, 1.0, 4)  # step, samples, temperature, index of the prompt
    # The seconds in the environment count for the step in which they passed.
    assert completions == [replace(saved, conversation=replace(record, environment_s=0.0)), plain]


def test_log_has_the_parts_of_a_response():
    tokenizer = LETTERS.load()
    ids = tokenizer("abcde", add_special_tokens=False)["input_ids"]
    mask = [True, True, False, False, True]
    rollout = rollout_of([Response([1], ids, policy=mask), Response([1], [*ids, 2])])
    rewards = torch.zeros(rollout.response_ids.shape)
    rewards[0, 1] = 0.5
    parts = segments_of(tokenizer, replace(rollout, conversation=ConversationTokens(rewards)), 0)["segments"]
    assert parts == [
        {"from": "policy", "text": "ab", "reward": 0.5},
        {"from": "environment", "text": "cd"},
        {"from": "policy", "text": "e"},
    ]
    assert segments_of(tokenizer, rollout, 0)["segments"][0] == {"from": "policy", "text": "ab"}
    assert segments_of(tokenizer, rollout, 1) == {}


def test_table_marks_the_turns_of_the_policy(tmp_path, capsys):
    run(tmp_path, guessing(), steps=1, callbacks=[RolloutLog(table_every_n_steps=1, table_rows=100)])
    printed = capsys.readouterr().out
    assert "; turns of the policy are in ⟦ ⟧" in " ".join(printed.split())
    assert printed.count("⟦") == printed.count("⟧") > 4


@dataclass(frozen=True)
class Twos(AdvantageEstimator):
    """Returns an advantage of 2 for every token of the policy."""

    def __call__(self, inputs, ranks=None):
        advantages = returns = 2.0 * inputs.mask
        return advantages, returns


def test_gradient_of_two_turns_is_that_of_the_loss_over_sampled_tokens(tmp_path):
    """REINFORCE on one conversation, compared with a loop over its sampled tokens in float64."""
    row = Response([3, 4], [5, 6, 2, 7, 8, 9, 2], reward=2.0, policy=[True, True, True, False, False, True, True])
    module = RLHFModule(
        TinyModel(),
        advantages=Twos(),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        minibatch_size=1,
        max_grad_norm=None,
    )
    module.configure_model()
    model = copy.deepcopy(module.actor.lm).double()
    before = [parameter.detach().clone() for parameter in module.actor.lm.parameters()]
    fit(module, [rollout_of([row])], default_root_dir=tmp_path)
    ids = torch.tensor([row.prompt + row.tokens])
    logprobs = model(ids).logits.log_softmax(-1)
    total = 0.0
    for position, (token, sampled) in enumerate(zip(row.tokens, row.mask, strict=True)):
        if sampled:
            total = total - 2.0 * logprobs[0, len(row.prompt) - 1 + position, token]
    (total / sum(row.mask)).backward()
    for old, new, exact in zip(before, module.actor.lm.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(old - new, exact.grad.float(), rtol=1e-4, atol=1e-6)


def nothing():
    """Return without any action."""


class NeedsMore:
    def step(self, text, answer):
        return text


class NeedsLess:
    def reset(self, row, column):
        return None

    def step(self, turn):
        return turn.text


class RunsHelper:
    def run(self, command):
        return command

    def step(self, text):
        return self.run(text)


class NoArguments:
    def step():
        return "a method without self"


class StepOnly:
    def step(self, text):
        return Reply(text, done=text == "a")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (NeedsMore, r"NeedsMore.step\(\) has the argument 'answer', .* gets text, calls, turn"),
        (NeedsLess, r"NeedsLess.reset\(\) has the argument 'column', .* gets row, seed"),
    ],
)
def test_methods_with_unpassed_arguments_are_rejected(factory, message):
    with pytest.raises(ValueError, match=message):
        EnvironmentSettings(factory)


def test_environment_may_have_a_helper_with_the_name_of_an_agent_method():
    assert not EnvironmentSettings(RunsHelper).is_agent


def test_method_without_parameters_is_accepted_by_the_settings():
    EnvironmentSettings(NoArguments)  # its first call reports the error


@pytest.mark.parametrize("timeout_s", [None, pytest.param(60.0, marks=pytest.mark.slow)])
def test_environment_may_have_only_a_step(tmp_path, timeout_s):
    settings = EnvironmentSettings(StepOnly, max_turns=2, max_turn_tokens=3, timeout_s=timeout_s, bridge="plain")
    module, _ = run(tmp_path, settings, steps=1)
    assert written_by_environment(module.last_step.experience.rollout).any()


def test_tools_need_a_parser_whose_tool_exists(tmp_path):
    tools = {"factory": Tools, "arguments": {"functions": [nothing]}, "bridge": "plain"}
    for parser, message in (
        (None, "has the tools nothing, but without a parser no call is found: set parser"),
        (MarkedToolCalls("none", "x"), "MarkedToolCalls calls the tool 'none', but the tools are nothing"),
        (MarkedToolCalls("nothing", "x"), "sets the argument 'x' of nothing, but its arguments are absent"),
    ):
        with pytest.raises(ValueError, match=message):
            EnvironmentSettings(**tools, parser=parser).check_parser(LETTERS.load())


def test_changed_settings_of_an_environment_are_reported():
    loops = [RolloutLoop([], environment=EnvironmentSettings(CountsA, max_turns=turns)) for turns in (4, 10)]
    now, before = (rollout_settings([loop]) for loop in loops)
    assert changes(before, now) == {"max_turns of the environment": "max_turns of the environment is 4, was 10"}
