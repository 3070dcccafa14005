"""Responses of the data in place of sampled ones: which prompts have them, and what metrics and logs make of them."""

import json
import math
from functools import partial

import pytest
import torch

from lightning_rlhf import DistillationModule, GRPOModule, PromptDataModule
from lightning_rlhf.callbacks import DynamicSampling, RolloutLog, RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.extras.algorithms.given_rollouts import given_positions
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.given_responses import GivenResponses
from tests.environments import worlds
from tests.stand_ins import TINY_LLAMA, ScriptedEngine, TinyModel, quiet_trainer

LETTERS = CharacterTokenizer("abcdefg")
TEACHER = TinyModel(seed=7, architecture={**TINY_LLAMA, "num_hidden_layers": 1})
ROWS = [
    {"prompt": "a", "completion": "gf", "source": "shown"},
    {"prompt": "bb", "completion": "e", "source": "asked"},
    {"prompt": "ccc", "completion": "gfe", "source": "shown"},
    {"prompt": "d", "completion": "f", "source": "asked"},
]


def one(completions):
    return [1.0] * len(completions)


def distil(directory, responses, rows=ROWS, kind=DistillationModule, steps=2, callbacks=(), model=(), **loop):
    """Return the module and its rollouts after a run whose engine answers ``ab``."""
    seen = []

    def count(completions):
        seen.append(list(completions))
        return one(completions)

    loop = RolloutLoop(
        rewards=[RewardFunction(count, name="count")],
        engine=ScriptedEngine(["ab"], LETTERS.load()),
        given_responses=responses,
        **{"check_rows": 4, "max_logprob_diff": 100.0, "max_response_tokens": 5, **loop},
    )
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), "minibatch_size": 4}
    if kind is DistillationModule:
        options |= {"teacher": TEACHER, "divergence": Divergence(top_k=3)}
    module = kind(TinyModel(), **{**options, **dict(model)})
    data = PromptDataModule(InMemory(rows), tokenizer=LETTERS, batch_size=4, max_tokens=8)
    trainer = quiet_trainer(default_root_dir=directory, callbacks=[loop, *callbacks], max_steps=steps, max_epochs=steps)
    trainer.fit(module, datamodule=data)
    module.seen = seen[1:]  # without the call before the run
    return module


def texts_of(module):
    rollout, tokenizer = module.last_step.experience.rollout, LETTERS.load()
    rows = zip(rollout.prompt_ids, rollout.prompt_lengths, rollout.response_ids, rollout.response_lengths, strict=True)
    return [
        (tokenizer.decode(prompt[:n]), tokenizer.decode(response[:t], skip_special_tokens=True), int(response[t - 1]))
        for prompt, n, response, t in rows
    ]


@pytest.mark.parametrize("samples", [1, 2])
def test_prompts_of_some_sources_have_the_response_of_their_row(tmp_path, samples):
    module = distil(tmp_path, GivenResponses(on_policy={"shown": 0.0}), group_size=samples)
    rollout, end = module.last_step.experience.rollout, LETTERS.load().eos_token_id
    answers = {(row["prompt"], row["completion"], end) for row in ROWS if row["source"] == "shown"}
    of_data = [text for text, is_given in zip(texts_of(module), rollout.is_given.tolist(), strict=True) if is_given]
    assert set(of_data) == answers
    assert len(of_data) == 2
    others = [text for text, is_given in zip(texts_of(module), rollout.is_given.tolist(), strict=True) if not is_given]
    assert sorted(prompt for prompt, *_ in others) == sorted(["bb", "d"] * samples)
    assert {answer for _, answer, _ in others} == {"ab"}
    assert len(rollout.position.unique()) == len(rollout)
    assert len(rollout.group.unique()) == 4


def test_given_responses_are_learnt_from_but_have_no_reward(tmp_path):
    module = distil(tmp_path, GivenResponses(on_policy={"shown": 0.0}), callbacks=[RolloutLog()])
    experience = module.last_step.experience
    of_data = experience.rollout.is_given
    assert experience.mask[of_data].any(dim=1).all()
    assert experience.rollout.rewards["count"][of_data].isnan().all()
    assert [len(texts) for texts in module.seen] == [2, 2]  # rewards of the sampled responses only
    metrics = module.trainer.callback_metrics
    assert metrics["reward/mean"] == metrics["reward/count"] == 1.0
    assert metrics["rollout/response_tokens_max"] == 3
    torch.testing.assert_close(experience.rollout.rollout_logprobs[of_data], experience.old_logprobs[of_data])
    lines = [json.loads(line) for line in (tmp_path / "rollouts/step-000002.jsonl").read_text().splitlines()]
    assert sorted((line["prompt"], line["stop"]) for line in lines) == [
        ("a", "given"), ("bb", "stop"), ("ccc", "given"), ("d", "stop")
    ]  # fmt: skip
    assert len({line["group"] for line in lines}) == 4


def test_step_may_have_given_responses_only(tmp_path):
    module = distil(tmp_path, GivenResponses())
    assert module.last_step.experience.rollout.is_given.all()
    assert sorted(answer for _, answer, _ in texts_of(module)) == ["e", "f", "gf", "gfe"]
    assert math.isnan(module.trainer.callback_metrics["reward/mean"])
    assert module.trainer.callback_metrics["loss/distillation"] > 0


@pytest.mark.parametrize("on_policy", [{"shown": 0.0}, 0.0])
def test_given_responses_have_no_limits(tmp_path, on_policy):
    module = distil(tmp_path, GivenResponses(on_policy=on_policy), top_k=3)
    rollout = module.last_step.experience.rollout
    assert torch.equal(rollout.is_given, rollout.allowed.counts.sum(dim=1) == 0)
    assert rollout.allowed.counts.max() <= 4  # the engine's tokens are not the actor's


def test_fraction_is_drawn_anew_in_each_epoch():
    settings = GivenResponses(on_policy=0.25)
    rows = [{"prompt": "a" * n, "completion": "b"} for n in range(1, 8)] * 60
    data = PromptDataModule(InMemory(rows), tokenizer=LETTERS, batch_size=len(rows), max_tokens=8)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    first, again = given_positions(settings, batch), given_positions(settings, batch)
    assert first == again
    assert abs(len(first) / len(rows) - 0.75) < 0.07
    batch.__dict__["epoch"] = 1
    assert given_positions(settings, batch) != first


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_steps_of_older_weights_have_given_rows_too(tmp_path, max_staleness):
    options = {"max_staleness": max_staleness, "steps": 3, "check_rows": 0}
    module = distil(tmp_path, GivenResponses(on_policy={"shown": 0.0}), **options)
    assert sorted(module.last_step.experience.rollout.is_given.tolist()) == [False, False, True, True]


@pytest.mark.parametrize("on_policy", [{"shown": 0.0}, 0.0])
def test_conversations_have_given_responses_beside_them(tmp_path, on_policy):
    environment = EnvironmentSettings(worlds.Guess, bridge="plain", max_turns=2, timeout_s=None)
    options = {"environment": environment, "max_response_tokens": 12, "check_rows": 0}
    module = distil(tmp_path, GivenResponses(on_policy=on_policy), **options)
    rollout = module.last_step.experience.rollout
    assert rollout.is_given.sum() == (2 if isinstance(on_policy, dict) else 4)
    assert not rollout.conversation.step_rewards[rollout.is_given].any()
    assert rollout.rewards["environment"][rollout.is_given].isnan().all()
    assert rollout.response_mask[rollout.is_given].sum() == rollout.response_lengths[rollout.is_given].sum()


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (GivenResponses("answer"), {}, r"training row 0 has no response in the column 'answer', .* \['completion',"),
        (GivenResponses(on_policy={"other": 0.5}), {}, "has the source 'other', but the rows have"),
        (GivenResponses(), {"max_response_tokens": 3}, "of training row 2 has 4 tokens .*, more than max_response_to"),
        (GivenResponses(), {"kind": GRPOModule, "group_size": 2}, "GRPOModule learns from sampled responses only"),
        (GivenResponses(), {"teacher_prompt": "completion"}, "given_responses and teacher_prompt .* cannot be"),
        (
            GivenResponses(),
            {"rows": [{"prompt": "a", "completion": "\ud800"}]},
            "row 0 is not valid Unicode",
        ),
        (GivenResponses(), {"dynamic_sampling": DynamicSampling(4)}, "given_responses and dynamic_sampling .* cannot"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, settings, options, message):
    with pytest.raises(ValueError, match=message):
        distil(tmp_path, settings, **options)


def test_response_that_ends_with_its_end_token_may_be_as_long_as_the_limit(tmp_path):
    rows = [{"prompt": "a", "completion": "bb</s>"}, {"prompt": "b", "completion": "cc"}] * 2
    distil(tmp_path, GivenResponses(), rows=rows, max_response_tokens=3)
    with pytest.raises(
        ValueError, match="training row 1 has 3 tokens with its end token, more than max_response_tokens 2"
    ):
        distil(
            tmp_path,
            GivenResponses(),
            rows=[{"prompt": "a", "completion": "b</s>"}, rows[1]] * 2,
            max_response_tokens=2,
        )


def test_fraction_out_of_range_raises():
    with pytest.raises(ValueError, match=r"on_policy of given_responses must be in \[0, 1\], got 2"):
        GivenResponses(on_policy=2)
    with pytest.raises(ValueError, match="on_policy of the source 'a' of given_responses"):
        GivenResponses(on_policy={"a": -0.5})
