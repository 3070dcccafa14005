"""RolloutLoop: invalid settings, requests to the engine, and shutdown of the engine."""

import logging
import re
import traceback
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import (
    ConversationDataModule,
    GRPOModule,
    PPOModule,
    PromptDataModule,
    ReMaxModule,
    RLOOModule,
    SFTModule,
)
from lightning_rlhf.callbacks import DynamicSampling, RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.functional.seeding import derive_seed
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.callbacks.conftest import ROWS, exact
from tests.helpers import assert_close
from tests.stand_ins import TINY_LLAMA, TinyModel, quiet_trainer


def needs_more(completions, answers):
    return [0.0] * len(completions)


def wider(size):
    return TinyModel(TINY_LLAMA | {"vocab_size": size})


class Listening(TransformersEngine):
    """Records the requests."""

    def __init__(self):
        super().__init__()
        self.requested = []

    def request(self, prompts, sampling, seeds):
        futures = super().request(prompts, sampling, seeds)
        self.requested.append((sampling[0], list(seeds), [future.result() for future in futures]))
        return futures


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"val_samples": 0}, "val_samples must be at least 1, got 0"),
        ({"max_response_tokens": 0}, "max_response_tokens must be at least 1, got 0"),
        ({"check_rows": -1}, "check_rows must be at least 0, got -1"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
        ({"max_logprob_diff": 0.0}, "max_logprob_diff must be positive or null, got 0.0"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RolloutLoop(**arguments)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"model": {"minibatch_size": 3}, "loop": {"group_size": 2}},
            "minibatch_size 3 does not divide the 4 responses of a step (2 prompts x group_size 2): set "
            "model.init_args.minibatch_size to 2 or 4",
        ),
        (
            {"model": {"minibatch_size": 64}},
            "minibatch_size 64 does not divide the 2 responses of a step (2 prompts x group_size 1): set "
            "model.init_args.minibatch_size to 2",
        ),
        (
            {"data": {"tokenizer": CharacterTokenizer("abcdefghi")}},
            "the tokenizer has 13 tokens, the actor only 11: use the tokenizer that belongs to the actor",
        ),
        (
            {"loop": {"rewards": []}},
            "no reward is configured: set RolloutLoop.rewards, RolloutLoop.environment or the module's",
        ),
        (
            {"loop": {"val_metric": "correct"}},
            "val_metric must be the name of a reward, one of ['exact'], got 'correct'",
        ),
        (
            {"loop": {"rewards": [RewardFunction(needs_more)]}},
            "reward function 'needs_more' needs 'answers', but a rollout provides only ['prompts', 'completions', ",
        ),
        (
            {"model": {"reward_model": wider(12)}},
            "vocabulary sizes differ (the reward_model 12, the actor 11), and there is no tokenizer to compare",
        ),
    ],
    ids=["minibatch", "large minibatch", "tokenizer", "no judge", "val_metric", "column", "vocabularies"],
)
def test_invalid_settings_raise_before_any_model_is_loaded(run, monkeypatch, parts, message):
    monkeypatch.setattr(TinyModel, "causal", None)
    made = run(**parts)
    with pytest.raises(ValueError, match=re.escape(message)):
        made.fit()
    assert "wait" not in made.engine.calls
    assert made.engine.calls[-1:] in ([], ["close"])  # not started, or ended


def test_module_must_train_on_rollouts_and_data_must_be_prompts(tokenizer, tmp_path, run):
    rows = InMemory([{"prompt": "a", "completion": "b"}] * 2)
    conversations = ConversationDataModule(rows, CharacterTokenizer("abcdefg"), batch_size=2)
    trainer = quiet_trainer(callbacks=[RolloutLoop([RewardFunction(exact)])], default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"RolloutLoop needs an RLHFModule .* and a PromptDataModule"):
        trainer.fit(SFTModule(TinyModel()), datamodule=conversations)
    with pytest.raises(ValueError, match="cannot train on the rows of ConversationDataModule: use PromptDataModule"):
        trainer.fit(run().module, datamodule=conversations)


# -- the engine is right, and if not it is seen ------------------------------------------------------------------------


class Stale(TransformersEngine):
    """Loses one parameter of the second push."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def update_weights(self, parameters, version):
        saved = dict(self._running.named_parameters())[self.name].clone() if version == 1 else None
        super().update_weights(parameters, version)
        if saved is not None:
            with torch.no_grad():
                dict(self._running.named_parameters())[self.name].copy_(saved + 0.05)


def test_lost_weight_raises_an_error_with_its_name(run):
    name = "model.layers.1.self_attn.v_proj.weight"
    made = run(loop={"engine": Stale(name), "check_rows": 2})
    with pytest.raises(
        RuntimeError, match=r"the engine does not hold the actor's weights: after the push of step 1 their"
    ) as error:
        made.fit()
    assert "(allowed: 0.001, max_logprob_diff)" in str(error.value)
    assert str(error.value).endswith(f"the first parameter that differs is {name}")
    assert made.trainer.global_step == 1
    assert made.loop.running_engine._model is None  # closed


def test_lost_weight_is_distinguished_from_a_different_computation(run):
    made = run(loop={"check_rows": 2})  # the scripted log-probability is -1 for every token
    with pytest.raises(RuntimeError, match="all weights of the last push were transferred correctly, so the engine"):
        made.fit()


def test_limit_can_be_set_and_the_check_disabled(run):
    run(loop={"check_rows": 2, "max_logprob_diff": 100.0}).fit()
    run(loop={"check_rows": 0}).fit()


def test_check_passes_with_a_real_engine_and_its_metric_is_small(run):
    made = run(loop={"engine": TransformersEngine(), "check_rows": 2, "group_size": 2, "temperature": 0.7}).fit()
    assert made.metrics["rollout/logprob_diff_max"] < 1e-5


class Holding:
    """A reward that holds a resource and fails at a given step."""

    calls, holds, dry_call = 0, False, False

    def __init__(self, fails_at):
        self.fails_at = fails_at

    def __call__(self, completions):
        self.holds, self.calls = True, self.calls + 1
        if self.calls == self.fails_at:
            raise OSError("gone")
        return [0.0] * len(completions)

    def close(self):
        self.holds = False


def test_rewards_are_closed_however_the_run_ends(run):
    good, bad = Holding(fails_at=0), Holding(fails_at=2)
    run(loop={"rewards": [RewardFunction(good)], "validate_at_ends": False}).fit()
    with pytest.raises(RuntimeError, match="'Holding' raised OSError: gone"):
        run(loop={"rewards": [RewardFunction(bad)], "validate_at_ends": False}).fit()
    assert (good.holds, bad.holds) == (False, False)
    assert (good.calls > 1, bad.calls) == (True, 2)


class RecordingPPO(PPOModule):
    """Records the actor's log-probabilities of each evaluation."""

    def actor_scores(self, role, rollout, squares=False):
        scores = super().actor_scores(role, rollout, squares)
        logprobs = scores.logprobs.detach().masked_fill(~rollout.response_mask, 0)
        self.evaluated = [*getattr(self, "evaluated", []), logprobs]
        return scores


def test_check_uses_the_mixed_precision_of_training(run):
    checked = {}
    for precision in ("32-true", "bf16-mixed"):
        made = run(loop={"check_rows": 2, "max_logprob_diff": 100.0}, trainer={"precision": precision})
        made.module.__class__ = RecordingPPO
        made.fit()
        at_check, at_learning = made.module.evaluated[:2]
        assert_close(at_check, at_learning)
        checked[precision] = at_check
    assert (checked["32-true"] - checked["bf16-mixed"]).abs().max() > 1e-3


# -- requests ----------------------------------------------------------------------------------------------------------


def requests(run, **parts):
    engine = Listening()
    run(loop={"engine": engine, "group_size": 2, "validate_at_ends": False, **parts.pop("loop", {})}, **parts).fit()
    return engine.requested


@pytest.mark.slow
def test_every_sample_has_a_different_seed_in_every_epoch(run):
    requested = requests(run, trainer={"max_epochs": 3}, data={"val": InMemory(ROWS)}, loop={"val_samples": 2})
    training = [
        seed for sampling, seeds, _ in requested if sampling.temperature == 1 and len(seeds) == 4 for seed in seeds
    ]
    assert len(training) > 12
    greedy = [seeds for sampling, seeds, _ in requested if sampling.temperature == 0]
    sampled = [seeds for (sampling, _, _), (_, seeds, _) in pairwise(requested) if sampling.temperature == 0]
    assert len(greedy) == len(sampled) == 6  # two batches in each of three validations
    assert sampled[0::2] == [sampled[0]] * 3  # the same at every validation
    of_training = [derive_seed(0, "train", epoch, i, k) for epoch in range(3) for i in range(4) for k in range(2)]
    of_validation = [derive_seed(0, "validation", 0, i, k) for i in range(4) for k in range(2)]
    assert set(sampled[0] + sampled[1]) == set(of_validation)
    drawn = [
        seed for sampling, seeds, _ in requested if sampling.temperature == 1 for seed in seeds if seed in of_training
    ]
    assert sorted(drawn) == sorted(of_training)  # each once
    assert not set(of_training) & set(of_validation)


def test_second_run_sends_the_same_requests(run):
    assert requests(run) == requests(run)


def test_another_seed_sends_different_requests(run, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    first = requests(run)
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    second = requests(run)
    assert not {seed for _, seeds, _ in first for seed in seeds} & {seed for _, seeds, _ in second for seed in seeds}


def test_request_has_temperature_limit_and_end_token(run):
    (sampling, _, completions), *_ = requests(run, loop={"temperature": 0.5, "max_response_tokens": 3})
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_token_ids) == (0.5, 3, (2,))
    assert not sampling.limits
    assert all(len(completion.token_ids) <= 3 for completion in completions)


def test_response_ends_after_any_additional_stop_token(run):
    stops = {2, 5, 7}
    (sampling, _, completions), *_ = requests(
        run, loop={"max_response_tokens": 24, "group_size": 8, "stop_token_ids": [5, 7]}
    )
    assert sampling.stop_token_ids == (2, 5, 7)
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert {completion.token_ids[-1] for completion in ended} == stops
    assert not any(stops & set(completion.token_ids[:-1]) for completion in completions)


def test_transformers_accepts_a_temperature_that_vllm_rejects(run):
    run(loop={"engine": TransformersEngine(), "temperature": 2.5, "check_rows": 2}).fit()


def test_trial_run_limits_the_response_length(run):
    made = run(loop={"max_response_tokens": 200, "engine": Listening()}, trainer={"fast_dev_run": 1}).fit()
    assert [sampling.max_tokens for sampling, _, _ in made.loop.running_engine.requested] == [16]
    assert made.loop.max_response_tokens == 200  # of a later run with this callback


# -- start and end -----------------------------------------------------------------------------------------------------


def test_auto_engine_logs_its_choice_and_the_reason(run, monkeypatch, caplog):
    monkeypatch.setattr("lightning_rlhf.rollout.choose.vllm_installed", lambda: False)
    caplog.set_level("INFO", "lightning_rlhf")
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    made = run(loop={"engine": "auto"}).fit()
    assert isinstance(made.loop.running_engine, TransformersEngine)
    output = [record.getMessage() for record in caplog.records if "Rollouts by" in record.getMessage()]
    assert output == ["Rollouts by TransformersEngine: vLLM is not installed."]


def test_engine_starts_before_the_models_load(run, monkeypatch):
    made, order = run(), []
    made.engine.start = lambda setup: order.append("start")
    made.engine.wait = lambda: order.append("wait") or "a script"
    build = made.module.build_role
    monkeypatch.setattr(made.module, "build_role", lambda name: order.append(name) or build(name))
    made.fit()
    assert order == ["start", "actor", "critic", "wait"]


def test_rewards_are_closed_after_the_engine_that_may_still_request_them(run, monkeypatch):
    made, order = run(), []
    close = made.loop.reward_executor.close
    monkeypatch.setattr(made.loop.reward_executor, "close", lambda: order.append("rewards") or close())
    monkeypatch.setattr(made.engine, "close", lambda: order.append("engine"))
    made.fit()
    assert order == ["engine", "rewards"]


def test_engine_gets_the_architecture_before_the_weights(run, tmp_path):
    made, seen = run(loop={"max_response_tokens": 5}), []
    made.engine.start = seen.append
    made.fit()
    (setup,) = seen
    assert (setup.dtype, setup.max_tokens) == ("float32", 13)  # prompts of up to 8
    assert setup.model == tmp_path / "engine" / "rank0"
    assert setup.log == tmp_path / "engine" / "rank0.log"
    assert [path.name for path in setup.model.iterdir()] == ["config.json"]


class Boom(Callback):
    def __init__(self, hook, kind=ValueError):
        def explode(*args, **kwargs):
            raise kind("boom")

        setattr(self, hook, explode)


@pytest.mark.parametrize(
    "hook", ["on_fit_start", "on_train_start", "on_validation_end", "on_train_batch_end", "on_train_end"]
)
def test_engine_is_closed_after_any_error(run, hook):
    made = run(callbacks=[Boom(hook)], data={"val": InMemory(ROWS)})
    with pytest.raises(ValueError, match="boom"):
        made.fit()
    assert made.engine.calls[0] == "start"
    assert made.engine.calls[-1] == "close"


def test_engine_is_closed_on_an_interrupt(run):
    made = run(callbacks=[Boom("on_train_batch_end", KeyboardInterrupt)])
    with pytest.raises(SystemExit):
        made.fit()
    assert made.engine.calls[-1] == "close"


def test_failing_reward_function_closes_the_engine_and_is_reported(run):
    def faulty(completions):
        return [1 / 0 for _ in completions]

    made = run(loop={"rewards": [RewardFunction(faulty, dry_call=False)]})
    with pytest.raises(RuntimeError, match="reward function 'faulty' raised ZeroDivisionError: division") as error:
        made.fit()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert made.engine.calls[-1] == "close"


def test_unusable_reward_function_raises_before_any_model_is_loaded(run, monkeypatch):
    def untried(completions):
        raise RuntimeError("costs money")

    def faulty(completions):
        return [1 / len(text) for text in completions]

    monkeypatch.setattr(TinyModel, "causal", None)
    untried.dry_call = False
    made = run(loop={"rewards": [RewardFunction(untried), RewardFunction(faulty, on_error="skip")]})
    output = (
        "'faulty' raised ZeroDivisionError: division by zero; it was called before the run on a completion that repeats"
    )
    with pytest.raises(ValueError, match=output) as error:
        made.fit()
    lines = traceback.extract_tb(error.value.__cause__.__traceback__)
    assert [line.name for line in lines] == ["faulty", "<listcomp>"][: len(lines)]  # its author's, and none of ours
    assert "start" not in made.engine.calls


def test_weights_are_synced_once_per_step(run):
    made = run(data={"val": InMemory(ROWS)}, trainer={"val_check_interval": 1}).fit()
    pushes = [call for call in made.engine.calls if call.startswith("update_weights")]
    assert pushes == ["update_weights 0", "update_weights 1", "update_weights 2"]


@pytest.mark.slow
def test_same_loop_can_run_again_and_syncs_again(run):
    made = run(loop={"engine": TransformersEngine(), "check_rows": 2}, data={"val": InMemory(ROWS)}).fit()
    before = made.metrics
    (measured,) = made.trainer.validate(made.module, datamodule=made.data, verbose=False)  # another start of the engine
    assert measured["val/fraction_correct_greedy"] == before["val/fraction_correct_greedy"]
    again = run(data={"val": InMemory(ROWS)})
    again.trainer.callbacks[again.trainer.callbacks.index(again.loop)] = made.loop
    again.fit()  # the check would see weights that were not pushed
    assert again.trainer.global_step == 2


# -- greedy baselines -------------------------------------------------------------------------------------------------


def test_remax_gets_a_scored_greedy_response_to_each_prompt(tmp_path):
    class Recorded(ReMaxModule):
        def receive(self, inputs):
            self.inputs = inputs.rollout, inputs.greedy
            super().receive(inputs)

    engine = Listening()
    loop = RolloutLoop(
        [RewardFunction(exact)], engine, group_size=2, max_response_tokens=3, val_metric="exact", validate_at_ends=False
    )
    module = Recorded(TinyModel(), minibatch_size=4)
    data = PromptDataModule(InMemory(ROWS), CharacterTokenizer("abcdefg"), batch_size=2, max_tokens=8, shuffle=False)
    quiet_trainer(default_root_dir=tmp_path, callbacks=[loop], max_steps=1).fit(module, datamodule=data)
    rollout, greedy = module.inputs
    (sampled, _, _), (likeliest, _, output) = engine.requested
    assert (sampled.temperature, likeliest.temperature) == (1.0, 0.0)
    assert (len(rollout), len(greedy)) == (4, 2)
    assert greedy.prompt_ids.tolist() == rollout.prompt_ids[::2].tolist()
    assert greedy.response_lengths.tolist() == [len(completion.token_ids) for completion in output]
    assert greedy.rewards.keys() == {"exact"}


def test_estimator_that_compares_responses_needs_at_least_two(run):
    loop = run().loop
    module = GRPOModule(TinyModel(), minibatch_size=2)
    data = PromptDataModule(InMemory(ROWS), CharacterTokenizer("abcdefg"), batch_size=2, max_tokens=8)
    with pytest.raises(
        ValueError, match=r"^GRPO compares the responses to one prompt: group_size must be at least 2, g"
    ):
        quiet_trainer(callbacks=[loop]).fit(module, datamodule=data)


@pytest.mark.parametrize(("minibatch_size", "warned"), [(2, 1), (4, 0)])
def test_loss_without_a_ratio_warns_about_a_second_update(tmp_path, caplog, minibatch_size, warned):
    loop = RolloutLoop([RewardFunction(exact)], TransformersEngine(), group_size=2, max_response_tokens=2)
    data = PromptDataModule(InMemory(ROWS), CharacterTokenizer("abcdefg"), batch_size=2, max_tokens=8)
    module = RLOOModule(TinyModel(), minibatch_size=minibatch_size)
    with caplog.at_level(logging.WARNING):
        quiet_trainer(default_root_dir=tmp_path, callbacks=[loop], fast_dev_run=True).fit(module, datamodule=data)
    messages = [record.message for record in caplog.records if "correct for one update" in record.message]
    assert messages == ["ReinforceLoss() is correct for one update per rollout, this run makes 2"] * warned


def needs_an_answer(completions, answer):
    return [0.0 for _ in completions]


def test_rows_without_a_column_of_a_reward_are_counted_before_the_run(tmp_path, caplog):
    rows = [
        {"prompt": "a", "answer": "b"},
        {"prompt": "b", "answer": None},
        {"prompt": "c"},
        {"prompt": "d", "answer": "e"},
    ]
    loop = RolloutLoop([RewardFunction(needs_an_answer)], TransformersEngine(), group_size=2, max_response_tokens=2)
    data = PromptDataModule(InMemory(rows), CharacterTokenizer("abcdefg"), batch_size=2, max_tokens=8)
    with caplog.at_level(logging.WARNING):
        trainer = quiet_trainer(default_root_dir=tmp_path, callbacks=[loop], fast_dev_run=True)
        trainer.fit(RLOOModule(TinyModel(), minibatch_size=2), datamodule=data)
    messages = [record.message for record in caplog.records if "have no" in record.message]
    assert messages == [
        "2 of 4 rows of the train data have no 'answer', which reward needs_an_answer needs; the first is row 1"
    ]


@pytest.mark.parametrize(
    ("loop", "data", "model", "ranks", "message"),
    [
        ({}, {}, {}, 3, "batch_size 2 and minibatch_size 2 count over all 3 ranks: both must be at least 3"),
        (
            {"dynamic_sampling": DynamicSampling(3), "group_size": 2},
            {"batch_size": 3},
            {"minibatch_size": 3},
            2,
            "2 ranks share batch_size 3 and prompts_per_step 3 equally: use multiples of 2",
        ),
    ],
)
def test_ranks_without_prompts_or_responses_raise(run, monkeypatch, loop, data, model, ranks, message):
    monkeypatch.setattr(DataRanks, "size", ranks)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(loop=loop, data=data, model=model).fit()


def test_temporary_engine_files_of_a_killed_run_with_more_ranks_are_removed(run, tmp_path):
    names = ["rank0.tmp", "rank1.tmp", "rank12.tmp", "rank1.log", "rankings.tmp", "rank1"]
    for name in names:
        (tmp_path / "engine" / name).mkdir(parents=True)
        (tmp_path / "engine" / name / "vllm_dist_of_a_dead_run").touch()
    run(trainer={"max_steps": 1}).fit()
    left = {path.name for path in (tmp_path / "engine").iterdir()}
    assert left == {*names, "rank0"} - {"rank1.tmp", "rank12.tmp"}  # an engine of rank 0 would remove its own


@pytest.mark.parametrize(("size", "updates"), [(None, 1), (2, 2)])
def test_an_update_takes_all_responses_of_a_step_by_default(run, size, updates):
    made = run(loop={"group_size": 2}, model={"minibatch_size": size}, trainer={"max_steps": 1})
    assert made.module.minibatch_size == (size or 0)
    made.fit()
    assert made.module.last_step.actor_updates == updates
    assert made.module.minibatch_size == 4 / updates
    again = run(loop={"group_size": 4}, trainer={"max_steps": 1})
    again.module = made.module  # the number is that of the run
    again.fit()
    assert made.module.minibatch_size == 8 / updates**2
