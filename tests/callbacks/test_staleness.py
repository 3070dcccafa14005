"""Rollouts requested before the step that trains on them: schedule, limit, metrics, checkpoints and errors."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_rlhf import PromptDataModule
from lightning_rlhf.callbacks import DynamicSampling, RolloutLoop, RunCheckpoint
from lightning_rlhf.callbacks.loop.engine_comparison import PushChecks, shortened
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.modules.algorithms import ReMaxModule
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.ahead import RestoredCompletions
from lightning_rlhf.rollout.engine import EngineTraits, finished
from lightning_rlhf.rollout.generation import PendingCompletions
from lightning_rlhf.rollout.sampler import Sampling
from lightning_rlhf.rollout.source import StepRequests
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import Completion
from tests.callbacks.conftest import ROWS
from tests.stand_ins import ScriptedEngine, prompt_batch

CORRECTION = {"correction": RolloutCorrection(level="token")}


@pytest.mark.parametrize(
    ("prompt", "response", "longest", "expected"),
    [
        ([1, 2, 3], [4, 5], 64, ([1, 2, 3], [4, 5])),
        ([1, 2, 3], [4, 5], 4, ([1, 3], [4, 5])),
        ([1, 2, 3], [4, 5], 3, ([1], [4, 5])),
        ([1, 2, 3], [4, 5], 2, ([1], [4])),
        ([1], [4], 1, ([1], [])),
        ([1, 2], [], 64, ([1, 2], [])),
        ([1], list(range(20)), 64, ([1], list(range(16)))),
    ],
)
def test_shortened_text_keeps_the_first_token_and_the_boundary_of_prompt_and_response(
    prompt, response, longest, expected
):
    assert shortened(prompt, response, longest) == expected


class Recorder(Callback):
    """Records the rollout of each step."""

    def __init__(self):
        self.rollouts = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.rollouts.append(pl_module.last_rollout)

    def versions(self):
        return [sorted(set(rollout.policy_version[rollout.response_mask].tolist())) for rollout in self.rollouts]

    def prompts(self):
        return [rollout.prompt_ids.tolist() for rollout in self.rollouts]


class Requested(ScriptedEngine):
    """Scripted engine that records (version, prompts, seeds) of each request."""

    def __init__(self, texts, tokenizer):
        super().__init__(texts, tokenizer)
        self.requests = []

    def generate(self, prompts, sampling, seeds):
        self.requests.append((self.version, [list(prompt) for prompt in prompts], list(seeds)))
        return super().generate(prompts, sampling, seeds)


def recorded(run, max_staleness, steps=5, loop=(), engine=Requested, **parts):
    recorder = Recorder()
    trainer = {"max_steps": steps, "max_epochs": -1, **parts.pop("trainer", {})}
    made = run(
        loop={"max_staleness": max_staleness, "validate_at_ends": False, **dict(loop)},
        trainer=trainer,
        callbacks=[recorder],
        **{"model": CORRECTION, **parts},
    )
    if engine is not None:
        made.loop.engine = made.engine = engine(made.engine.texts, made.engine.tokenizer)
    made.fit()
    made.recorder = recorder
    return made


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("max_staleness", "versions"),
    [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2]), (9, [0, 0, 0, 0, 0])],
)
def test_version_of_a_step_is_a_function_of_the_step(run, max_staleness, versions):
    assert recorded(run, max_staleness).recorder.versions() == [[version] for version in versions]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_each_step_trains_on_its_prompts_with_the_same_seeds_in_every_epoch(run, max_staleness):
    on_policy, ahead = recorded(run, 0), recorded(run, max_staleness)
    assert ahead.recorder.prompts() == on_policy.recorder.prompts()
    assert [request[1:] for request in ahead.engine.requests] == [request[1:] for request in on_policy.engine.requests]


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ({"max_steps": 3}, 3),
        ({"max_steps": -1, "max_epochs": 2}, 4),
        ({"max_steps": -1, "max_epochs": 2, "limit_train_batches": 1}, 2),
    ],
    ids=["steps", "epochs", "limited epochs"],
)
def test_nothing_is_requested_for_steps_after_the_end(run, trainer, steps):
    made = recorded(run, 2, trainer=trainer)
    assert len(made.recorder.rollouts) == len(made.engine.requests) == steps


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("shares_cores", [True, False])
@pytest.mark.parametrize(("max_staleness", "instance", "engine"), [(0, 3, 3), (1, 2, 1)])
def test_trainer_and_engine_divide_the_threads_during_the_run(run, shares_cores, max_staleness, instance, engine):
    threads = {}

    class Sharing(Requested):
        traits = EngineTraits(shares_cores=shares_cores)

        def start(self, setup):
            threads["engine"] = setup.threads

        def update_weights(self, parameters, version):
            threads["trainer"] = torch.get_num_threads()
            super().update_weights(parameters, version)

        def generate(self, *arguments):
            if self.version > 2:
                raise EngineDied("killed")
            return super().generate(*arguments)

    torch.set_num_threads(3)  # a fixture of conftest.py resets it
    recorded(run, max_staleness, steps=2, engine=Sharing)
    assert threads == {"engine": engine, "trainer": instance if shares_cores else 3}
    assert torch.get_num_threads() == 3
    with pytest.raises(RuntimeError, match="killed"):
        recorded(run, max_staleness, steps=9, engine=Sharing)
    assert torch.get_num_threads() == 3


class Echoing(TransformersEngine):
    """An engine that records (version, prompts) of each request with ``echo``, and corrupts one push."""

    def __init__(self, damaged=None):
        super().__init__()
        self.damaged, self.echoed = damaged, []

    def update_weights(self, parameters, version):
        scale = 3.0 if version == self.damaged else 1.0
        super().update_weights(((name, tensor * scale) for name, tensor in parameters), version)

    def request(self, prompts, sampling, seeds):
        if sampling[0].echo:
            self.echoed.append((self._version, [list(prompt) for prompt in prompts]))
        return super().request(prompts, sampling, seeds)


def echoing(run, max_staleness, damaged=None, steps=6, loop=(), **parts):
    """Return a run with this engine, and the messages of its error."""
    made = run(
        loop={
            "max_staleness": max_staleness,
            "validate_at_ends": False,
            "check_rows": 2,
            "group_size": 2,
            **dict(loop),
        },
        model={**CORRECTION, "minibatch_size": 4},
        trainer={"max_steps": steps, "max_epochs": -1},
        callbacks=[recorder := Recorder()],
        **parts,
    )
    made.loop.engine = made.engine = Echoing(damaged)
    made.recorder = recorder
    torch.manual_seed(0)
    return made


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_engine_and_actor_evaluate_the_ends_of_responses_after_each_push(run, max_staleness):
    made = echoing(run, max_staleness).fit()
    assert [version for version, _ in made.engine.echoed] == [1, 2, 3, 4, 5]  # step 0 compares its own responses
    for (_, texts), rollout in zip(made.engine.echoed, made.recorder.rollouts[1:], strict=True):
        firsts = rollout[[0, 2]]
        rows = zip(firsts.prompt_ids, firsts.prompt_lengths, firsts.response_ids, firsts.response_lengths, strict=True)
        assert texts == [[*prompt[:p].tolist(), *response[:r].tolist()] for prompt, p, response, r in rows]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("damaged", [1, 2])
def test_corrupted_push_ends_the_run_before_its_responses_are_used(run, max_staleness, damaged):
    made = echoing(run, max_staleness, damaged)
    with pytest.raises(
        RuntimeError, match=f"the same weights, but after the push of step {damaged} .* all weights of the"
    ):
        made.fit()
    assert made.trainer.global_step == damaged + max_staleness
    assert max(map(max, made.recorder.versions())) < damaged


def test_repeatedly_corrupted_push_reports_the_parameter(run):
    class Damaged(TransformersEngine):
        def update_weights(self, parameters, version):
            super().update_weights(parameters, version)
            if version:
                with torch.no_grad():
                    self._running.model.layers[1].self_attn.o_proj.weight.zero_()

    made = echoing(run, 2)
    made.loop.engine = Damaged()
    with pytest.raises(RuntimeError, match=r"the push of step 1.*differs is model.layers.1.self_attn.o_proj.weight"):
        made.fit()


def test_validation_waits_for_the_comparisons_of_earlier_pushes(run):
    made = echoing(run, 3, damaged=1, data={"val": InMemory([ROWS[0]])})
    with pytest.raises(RuntimeError, match="the push of step 1"):
        made.fit()
    assert made.trainer.global_step == 2  # an epoch has two steps, and the responses of the push were for step 4


def test_zero_rows_disable_the_comparison(run):
    made = echoing(run, 2, damaged=1, loop={"check_rows": 0}).fit()
    assert made.trainer.global_step == 6
    assert not made.engine.echoed


@pytest.mark.slow
def test_comparison_does_not_change_the_responses(run):
    made = [echoing(run, 2, loop={"check_rows": rows}).fit() for rows in (0, 2)]
    first, second = ([rollout.response_ids.tolist() for rollout in each.recorder.rollouts] for each in made)
    assert first == second
    weights = [dict(each.module.actor.named_parameters()) for each in made]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_long_texts_are_cut_after_the_first_token_of_the_prompt(run):
    made = echoing(run, 1, steps=2, loop={"max_response_tokens": 40})
    made.fit()
    sampler, module = made.loop._sampler, made.module
    prompts = prompt_batch([0], [list(range(3, 10)) * 20], ["a"], {})
    response = Completion([4] * 30, [-1.0] * 30, "length", 0)
    request = StepRequests(0, prompts, Sampling(1, 1.0), PendingCompletions(lambda: [response]), scorer=None)
    checked = []
    engine = ScriptedEngine([], tokenizer=None)
    engine.request = lambda texts, sampling, seeds: checked.append((texts, sampling[0])) or []
    for longest, length in ((200, 64), (30, 29)):
        with patch(
            "lightning_rlhf.callbacks.loop.engine_comparison.actor_logprobs",
            lambda _, rollout: rollout.rollout_logprobs,
        ):
            checks = PushChecks(replace(sampler, engine=engine, max_length=longest), module, 4, None)
            checks.launch(request, version=1)
        (texts, sampling), checked = checked[0], []
        assert [len(text) for text in texts] == [length]
        assert (texts[0][0], texts[0][-16:]) == (3, [4] * 16)
        assert (sampling.max_tokens, sampling.echo) == (1, True)


def change_echoed(engine, **changes):
    """Make the engine replace fields of the completions of requests with ``echo``."""
    request = engine.request

    def changed(prompts, sampling, seeds):
        futures = request(prompts, sampling, seeds)
        if not sampling[0].echo:
            return futures
        return finished(replace(future.result(), **changes) for future in futures)

    engine.request = changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [4], "logprobs": [-1.0]}, "returned 1 log-probabilities for a prompt of 3 tokens"),
        ({"policy_version": 0}, "used weights of version 0 after version 1 was pushed"),
    ],
    ids=["no echo", "older weights"],
)
def test_engine_without_log_probs_of_the_prompt_or_with_older_weights_raises(run, changes, message):
    made = echoing(run, 2)
    change_echoed(made.engine, **changes)
    with pytest.raises(RuntimeError, match=message):
        made.fit()


def test_texts_evaluated_with_later_weights_are_not_compared(run):
    made = echoing(run, 2, damaged=1)
    change_echoed(made.engine, policy_version=9)
    made.fit()


def test_validation_detects_a_corrupted_push_of_its_weights(run):
    loop = {"validate_at_ends": True, "val_samples": 2}
    made = echoing(run, 2, damaged=4, steps=4, loop=loop, data={"val": InMemory([ROWS[0]])})
    with pytest.raises(RuntimeError, match="the first parameter that differs is"):
        made.fit()


def test_later_rounds_of_dynamic_sampling_use_current_weights(run):
    rewards = [RewardFunction(lambda completions: [float("a" in text) for text in completions], name="first")]
    made = recorded(
        run,
        1,
        steps=2,
        texts=("b", "b", "b", "b", "a", "b"),
        loop={
            "rewards": rewards,
            "val_metric": None,
            "group_size": 2,
            "dynamic_sampling": DynamicSampling(prompts_per_step=1),
        },
        model={**CORRECTION, "minibatch_size": 2},
    )
    assert [(version, len(prompts)) for version, prompts, _ in made.engine.requests] == [
        (0, 2),  # first round of step 0
        (0, 2),  # first round of step 1, requested ahead
        (0, 2),  # second round of step 0
        (1, 2),  # second round of step 1
    ]


def test_greedy_responses_are_requested_in_advance_too(run, tmp_path):
    received = []

    class Stored(ReMaxModule):
        def receive(self, inputs):
            received.append(tuple(item.policy_version[0, 0].item() for item in (inputs.rollout, inputs.greedy)))
            super().receive(inputs)

    made = run(loop={"max_staleness": 1, "validate_at_ends": False}, trainer={"max_steps": 3, "max_epochs": -1})
    actor = made.module.sources["actor"]
    made.module = Stored(actor=actor, minibatch_size=2, correction=RolloutCorrection(level="token"))
    made.fit()
    assert received == [(0, 0), (0, 0), (1, 1)]


def test_staleness_and_idle_fractions_are_logged(run):
    metrics = recorded(run, 1).metrics
    assert metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == 1
    assert 0 <= metrics["perf/trainer_idle_fraction"] <= 1
    assert 0 <= metrics["perf/engine_idle_fraction"] <= 1


def test_run_without_staleness_logs_no_staleness_metrics(run):
    assert not [name for name in recorded(run, 0).metrics if "staleness" in name or "idle" in name]


def test_too_old_token_ends_the_run(run, monkeypatch):
    made = run(loop={"max_staleness": 1}, model=CORRECTION)
    generate = made.engine.generate
    made.engine.generate = lambda *request: [replace(item, policy_version=-2) for item in generate(*request)]
    monkeypatch.setattr("lightning_rlhf.rollout.generation.CompletionCheck.check_one", lambda self, completion: None)
    with pytest.raises(RuntimeError, match="a token is from weights that are 2 steps old, more than max_staleness 1"):
        made.fit()
    assert made.trainer.global_step == 0


# -- checkpoints --------------------------------------------------------------------------------------------------


class Interrupt(Callback):
    """Ends the run with KeyboardInterrupt after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def sampled(run, directory, max_staleness, resume=None, interrupted_after=None):
    """Return (versions, tokens) of each step of a run whose responses depend on the weights."""
    recorder = Recorder()
    made = run(
        loop={"max_staleness": max_staleness, "engine": TransformersEngine(), "validate_at_ends": False},
        model=CORRECTION,
        trainer={"max_steps": 7, "max_epochs": -1, "enable_checkpointing": True, "default_root_dir": directory},
        callbacks=[recorder, RunCheckpoint(every_n_steps=4), Interrupt(interrupted_after)],
    )
    torch.manual_seed(0)
    if interrupted_after is None:
        made.fit(ckpt_path=resume)
    else:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            made.fit()
    return [(rollout.policy_version.tolist(), rollout.response_ids.tolist()) for rollout in recorder.rollouts]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_resumed_run_trains_on_the_responses_requested_before_the_checkpoint(run, tmp_path, max_staleness):
    whole = sampled(run, tmp_path / "whole", max_staleness)
    sampled(run, tmp_path / "cut", max_staleness, interrupted_after=5)
    last = str(tmp_path / "cut" / "checkpoints" / "last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 4
    resumed = sampled(run, tmp_path / "cut", max_staleness, resume=last)
    assert resumed == whole[4:]
    assert len({str(item) for item in whole}) == 7


@pytest.mark.parametrize("error", [EngineDied("it ended"), RunError("it ended"), ValueError("it ended")])
def test_run_whose_requests_failed_is_saved_without_the_responses(run, caplog, error):
    class Ended(PendingCompletions):
        def result(self):
            raise error

    made = run(loop={"max_staleness": 1}, trainer={"max_steps": 1}).fit()
    prompts = prompt_batch([0], [[3]], ["a"], {})
    made.loop.parts.ahead._requests[1] = StepRequests(1, prompts, Sampling(1, 1.0), Ended(list), None)
    made.loop.parts.ahead.take_snapshot()
    checkpoint = {}
    made.loop.complete_snapshot(checkpoint)
    assert checkpoint == {"lightning_rlhf_requests": []}
    assert "The checkpoint has no responses for later steps, because their generation failed: it ended" in caplog.text
    checkpoint = {}
    made.loop.on_save_checkpoint(made.trainer, made.module, checkpoint)  # a save that is due
    assert checkpoint == {"lightning_rlhf_requests": []}


@pytest.mark.parametrize("others_have_all", [True, False])
def test_ranks_that_request_together_use_completions_of_a_checkpoint_together(others_have_all):
    class Group:
        calls = 0

        def gather(self, value):
            self.calls += 1
            return [value, others_have_all]

        def run_on_first(self, action):
            return action()

    group, restored, sampling = Group(), RestoredCompletions(), Sampling(1, 1.0)
    restored.steps = frozenset({3})
    restored._by_prompt = {(3, 1, 1.0, index): [Completion([index], [0.0], "stop", 2)] for index in (5, 6)}

    def popped(step, *indices):
        prompts = prompt_batch(list(indices), [[1]] * len(indices), ["a"] * len(indices), {})
        completions = restored.pop(step, prompts, sampling, group)
        return completions and [completion.token_ids[0] for completion in completions]

    assert popped(4, 5) is None  # a step of which the checkpoint has none, without a question to others
    assert popped(4) is None
    assert group.calls == 0
    assert popped(3) == ([] if others_have_all else None)  # a rank without prompts takes part
    assert popped(3, 5, 6) == ([5, 6] if others_have_all else None)
    restored._by_prompt.clear()
    assert popped(3, 5) is None
    assert group.calls == 3


# -- errors and warnings ------------------------------------------------------------------------------------------


def test_module_without_correction_for_older_weights_warns(run, caplog):
    recorded(run, 1, model={})
    assert "max_staleness is 1, so responses are from older weights, and the module does not correct" in caplog.text


def test_engine_without_overlap_warns(run, caplog):
    recorded(run, 1)
    assert "max_staleness 1 saves no time with Requested, which generates in the trainer's process" in caplog.text


def test_engine_that_sleeps_during_training_raises(run):
    class Sleeping(ScriptedEngine):
        traits = EngineTraits(sleeps=True)

    with pytest.raises(ValueError, match="generates while the module learns, so it cannot sleep then"):
        recorded(run, 1, engine=Sleeping)


def test_data_loader_without_known_later_batches_raises(run):
    class Plain(PromptDataModule):
        def train_dataloader(self):
            loader = super().train_dataloader()
            return DataLoader(list(loader), batch_size=None)

    made = run(loop={"max_staleness": 1}, model=CORRECTION)
    made.data.__class__ = Plain
    with pytest.raises(ValueError, match="max_staleness requests the prompts of later steps"):
        made.fit()


def test_negative_staleness_raises():
    with pytest.raises(ValueError, match="max_staleness must be at least 0, got -1"):
        RolloutLoop(max_staleness=-1)
