"""MixtureModule: the gradient is the weighted sum of those of separate runs, each with its own count."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf import DistillationModule, FromConfig, MixtureModule, RLHFModule, SFTModule
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.extras.algorithms.mixture import RewardObjective, SupervisedObjective, TeacherObjective
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from lightning_rlhf.objectives.group_advantages import GRPO, RLOO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus, ReMax
from lightning_rlhf.types import SequenceBatch
from tests.extras.algorithms import test_distillation
from tests.extras.algorithms.test_distillation import RATE, SECOND, STUDENT, TEACHER, Sources, change
from tests.helpers import assert_close
from tests.models.architectures import tiny
from tests.stand_ins import TINY_LLAMA, HandOver, Response, TinyModel, fit, quiet_trainer, responses, rollout_of

pytestmark = pytest.mark.usefixtures("exact")
ROWS = responses(12, seed=8)
SOURCE = torch.tensor([2, 2, 0, 1, 2, 0, 0, 2, 1, 1, 0, 2])  # math, chat, code: see Sources
TOKENS, WHOLE = TokenMean(), Divergence()
GROUP = torch.tensor([0, 0, 1, 2, 3, 1, 4, 3, 5, 6, 4, 3])
ROLLOUT = replace(
    rollout_of(ROWS, dtype=torch.float64), source=SOURCE, group=GROUP, is_given=SOURCE == 1
)  # code has given responses
OPTIONS = {"optimizer": partial(torch.optim.SGD, lr=RATE), "max_grad_norm": None}
MIXTURE = {
    "math": RewardObjective(RLOO(), weight=0.7),
    "chat": TeacherObjective(TEACHER, weight=2.0),
    "code": SupervisedObjective(weight=0.3),
}


def mixed(mixture=MIXTURE, rollout=ROLLOUT, **options):
    """Return a module after a step on the rows of three sources, with its metrics."""
    module = MixtureModule(STUDENT, mixture, **{"micro_batch_tokens": 30, **OPTIONS, **options})
    trainer = quiet_trainer(callbacks=[HandOver()])
    trainer.fit(module, datamodule=Sources(rollout))
    module.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module


def of_source(number):
    rollout = ROLLOUT[number == SOURCE]
    return replace(rollout, source=None, is_given=None, group=rollout.group.unique(return_inverse=True)[1])


def texts_of(rollout):
    """Return the responses of a rollout as marked texts."""
    rows = [
        [*prompt[:n].tolist(), *response[:t].tolist()]
        for prompt, n, response, t in zip(
            rollout.prompt_ids, rollout.prompt_lengths, rollout.response_ids, rollout.response_lengths, strict=True
        )
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    at = torch.arange(longest)
    return SequenceBatch(ids, lengths, (at >= rollout.prompt_lengths[:, None]) & (at < lengths[:, None]))


def alone(number, aggregation=TOKENS, divergence=WHOLE, loss="cross_entropy", **options):
    """Return the gradient of a run on the rows of one source, by the module for its objective."""
    if number == 1:
        module = SFTModule(STUDENT, optimizer=OPTIONS["optimizer"], max_grad_norm=None, loss=loss)
        fit(module, [texts_of(of_source(1))])
    elif number == 0:
        module = DistillationModule(STUDENT, TEACHER, divergence, aggregation, **OPTIONS)
        fit(module, [of_source(0)])
    else:
        module = RLHFModule(STUDENT, advantages=RLOO(), aggregation=aggregation, **OPTIONS, **options)
        fit(module, [of_source(2)])
    return change(module)


def weighted(*parts):
    return {name: sum(weight * part[name] for weight, part in parts) for name in parts[0][1]}


def assert_gradient(module, expected, tolerance=1e-12):
    for name, value in change(module).items():
        assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("tokens", [9, 30, 1000])
@pytest.mark.parametrize("top_k", [None, 4])
def test_gradient_is_the_weighted_sum_of_separate_runs(tokens, top_k):
    divergence = Divergence(0.3, top_k)
    module = mixed(micro_batch_tokens=tokens, divergence=divergence)
    assert_gradient(module, weighted((0.7, alone(2)), (2.0, alone(0, divergence=divergence)), (0.3, alone(1))))


def test_each_objective_has_its_own_aggregation_and_settings():
    mixture = {
        "math": RewardObjective(RLOO(), aggregation=SequenceMeanTokenSum(scale=5.0)),
        "chat": TeacherObjective(TEACHER, aggregation=SequenceMeanTokenMean()),
        "code": SupervisedObjective(loss="dft"),
    }
    kl = {"ref": SECOND, "kl_loss": KLTerm(0.2, "k3"), "ent_coef": 0.1}
    expected = weighted(
        (1.0, alone(2, SequenceMeanTokenSum(scale=5.0), **kl)),
        (1.0, alone(0, SequenceMeanTokenMean())),
        (1.0, alone(1, loss="dft")),
    )
    assert_gradient(mixed(mixture, **kl), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "granite", "mamba"])
def test_gradient_of_other_architectures_is_the_weighted_sum(kind, monkeypatch):
    student, teacher = (FromConfig(tiny(kind), dtype="float64", seed=seed) for seed in range(2))
    monkeypatch.setitem(globals(), "STUDENT", student)
    monkeypatch.setattr(test_distillation, "STUDENT", student)
    monkeypatch.setitem(globals(), "TEACHER", teacher)
    mixture = {**MIXTURE, "chat": TeacherObjective(teacher, weight=2.0)}
    # Their norms or states are computed in float32, where it matters which texts share a forward pass.
    tolerance = 1e-12 if kind == "gpt2" else 1e-6
    assert_gradient(mixed(mixture), weighted((0.7, alone(2)), (2.0, alone(0)), (0.3, alone(1))), tolerance)


@pytest.mark.slow
def test_gradient_of_texts_of_5000_tokens_is_the_weighted_sum(monkeypatch):
    draw = torch.Generator().manual_seed(1)
    rows = [Response([3], torch.randint(3, 11, (size,), generator=draw).tolist()) for size in (5000, 4, 5000, 5000)]
    source, group = torch.tensor([2, 2, 0, 1]), torch.tensor([0, 0, 1, 2])
    rollout = replace(rollout_of(rows, dtype=torch.float64), source=source, group=group, is_given=source == 1)
    long = {**TINY_LLAMA, "max_position_embeddings": 5002, "num_hidden_layers": 1}
    student, teacher = (TinyModel(dtype="float64", seed=seed, architecture=long) for seed in (0, 7))
    for name, value in (("STUDENT", student), ("TEACHER", teacher), ("ROLLOUT", rollout), ("SOURCE", source)):
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(test_distillation, "STUDENT", student)
    mixture = {**MIXTURE, "chat": TeacherObjective(teacher, weight=2.0)}
    expected = weighted((0.7, alone(2)), (2.0, alone(0)), (0.3, alone(1)))
    assert_gradient(mixed(mixture, rollout, micro_batch_tokens=6000), expected)


@pytest.mark.slow
def test_kl_in_the_reward_is_that_of_the_reward_objectives():
    kl = {"ref": SECOND, "kl_reward": KLTerm(0.2)}
    expected = weighted((0.7, alone(2, **kl)), (2.0, alone(0)), (0.3, alone(1)))
    assert_gradient(mixed(**kl), expected)
    without = weighted((0.7, alone(2)), (2.0, alone(0)), (0.3, alone(1)))
    assert any((expected[name] - without[name]).abs().max() > 1e-6 for name in expected)
    with pytest.raises(UsageError, match="kl_reward belongs to reward objectives, but the mixture has none"):
        MixtureModule(STUDENT, {"chat": TeacherObjective(TEACHER)}, **kl)


def test_each_mini_batch_divides_by_its_own_counts(monkeypatch):
    seen = []
    original = MixtureModule.minibatches
    monkeypatch.setattr(
        MixtureModule, "minibatches", lambda self, experience: map(recorder(seen), original(self, experience))
    )
    module = mixed(minibatch_size=6)
    assert module.metrics["policy/updates"] == len(seen) == 2
    assert [len(minibatch) for minibatch in seen] == [6, 6]
    for minibatch in seen:
        for number, weight in ((2, 0.7), (0, 2.0), (1, 0.3)):
            rows = minibatch.rollout.source == number
            expected = weight / minibatch.mask[rows].sum() if rows.any() else 0.0
            assert_close(minibatch.scale[rows], torch.full((int(rows.sum()),), float(expected)), rtol=1e-6)


def recorder(seen):
    return lambda minibatch: seen.append(minibatch) or minibatch


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("objective", ["math", "chat", "code"])
def test_sources_without_rows_in_a_step_have_metrics_that_are_nan(objective):
    number = Sources.source_names.index(objective)
    module = mixed(rollout=ROLLOUT[number != SOURCE])
    metrics = module.metrics
    assert math.isnan(metrics[f"mixture/{objective}/loss"])
    assert metrics[f"mixture/{objective}/fraction"] == 0
    assert all(torch.isfinite(value).all() for value in module.actor.state_dict().values())
    others = {"math": (0.7, 2), "chat": (2.0, 0), "code": (0.3, 1)}
    del others[objective]
    assert_gradient(module, weighted(*((weight, alone(source)) for weight, source in others.values())))


def test_metrics_are_those_of_separate_runs_by_source():
    metrics = mixed().metrics
    rollout = ROLLOUT[SOURCE == 2]
    assert_close(metrics["mixture/math/reward"], rollout.reward.mean())
    assert_close(metrics["mixture/math/response_tokens"], rollout.response_lengths.double().mean(), rtol=1e-6)
    for name, number, loss in (("chat", 0, "loss/distillation"), ("code", 1, "loss/sft"), ("math", 2, "loss/policy")):
        assert metrics[f"mixture/{name}/loss"] == metrics[loss]
        assert metrics[f"mixture/{name}/fraction"] == pytest.approx(float((number == SOURCE).double().mean()))
    assert_close(metrics["reward/mean"], ROLLOUT.reward[SOURCE != 1].mean(), rtol=1e-6)  # without given responses


@pytest.mark.parametrize("kind", [GRPO, RLOO, ReinforcePlusPlus])
def test_advantages_are_those_of_the_source_alone(kind):
    mixture = {"math": RewardObjective(kind()), "chat": RewardObjective(GRPO()), "code": SupervisedObjective()}
    module = mixed(mixture)
    experience = module.last_step.experience
    rows = experience.rollout.source == 2
    single = RLHFModule(STUDENT, advantages=kind(), **OPTIONS)
    fit(single, [of_source(2)])
    assert_close(experience.advantages[rows], single.last_step.experience.advantages, rtol=1e-12)
    assert not experience.advantages[experience.rollout.source == 1].any()


def test_one_teacher_per_source():
    mixture = {"math": TeacherObjective(SECOND), "chat": TeacherObjective(TEACHER), "code": SupervisedObjective()}
    module = mixed(mixture)
    assert module.frozen_roles == ("teacher_math", "teacher_chat")
    second = DistillationModule(STUDENT, SECOND, **OPTIONS)
    fit(second, [of_source(2)])
    assert_gradient(module, weighted((1.0, change(second)), (1.0, alone(0)), (1.0, alone(1))))


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ({}, "mixture must have an objective for each source of the prompts, got an empty dictionary"),
        ({"math": RewardObjective(), "chat": RewardObjective()}, "no objective for the source 'code': the rows have"),
        ({**MIXTURE, "math": RewardObjective(GAE())}, "GAE of the source 'math' needs a critic"),
        ({**MIXTURE, "math": RewardObjective(ReMax())}, "ReMax of the source 'math' needs a greedy response"),
    ],
)
def test_mistakes_are_one_sentence(mixture, message):
    with pytest.raises(UsageError, match=message):
        mixed(mixture)


def test_negative_weights_raise():
    with pytest.raises(UsageError, match="weight of SupervisedObjective must be at least 0, got -1"):
        SupervisedObjective(weight=-1)
