"""Distillation: the update of a student, compared with all logits at once; teachers of every kind."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader

from lightning_rlhf import DistillationModule, RLHFModule
from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.extras.algorithms.teacher_advantages import TeacherLogRatio
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, TokenMean
from lightning_rlhf.objectives.group_advantages import RLOO
from lightning_rlhf.types import PaddedPrompts
from tests.helpers import assert_close
from tests.models.architectures import tiny
from tests.stand_ins import TINY_LLAMA, HandOver, Response, TinyModel, fit, quiet_trainer, responses, rollout_of

pytestmark = pytest.mark.usefixtures("exact")
RATE = 0.1
STUDENT = TinyModel(dtype="float64")
TEACHER = TinyModel(dtype="float64", seed=7, architecture={**TINY_LLAMA, "num_hidden_layers": 1})
ROWS = responses(6, seed=8, observations=True)


def distilled(teacher=TEACHER, rollout=None, student=STUDENT, **options):
    """Return a module after one step of plain gradient descent, with its first weights and its metrics."""
    options = {
        "optimizer": partial(torch.optim.SGD, lr=RATE),
        "max_grad_norm": None,
        "micro_batch_tokens": 30,
        **options,
    }
    module = DistillationModule(student, teacher, **options)
    rollout = rollout_of(ROWS, dtype=torch.float64, temperature=0.7) if rollout is None else rollout
    module.metrics = fit(module, [rollout]).callback_metrics
    return module


def expected_gradients(beta, aggregation, rows=ROWS, teacher=TEACHER, top_k=None, teacher_prompts=None):
    """Return the gradient of the aggregated divergence by name, from all logits of each response."""
    student, other = STUDENT.causal().lm, teacher.causal().lm
    losses, counts = [], []
    for number, row in enumerate(rows):
        prompts = [row.prompt, row.prompt if teacher_prompts is None else teacher_prompts[number]]
        p, q = (
            lm(torch.tensor([prompt + row.tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
            for lm, prompt in zip((student, other), prompts, strict=True)
        )
        p, q = p.log_softmax(-1), q[:, : p.shape[1]].detach().log_softmax(-1)
        if top_k:
            ids = q.topk(top_k).indices
            p, q = (torch.cat([t := x.gather(-1, ids), (1 - t.exp().sum(-1, keepdim=True)).log()], -1) for x in (p, q))
        mixture = torch.logsumexp(torch.stack([p + torch.tensor(1 - beta).log(), q + torch.tensor(beta).log()]), dim=0)
        if beta == 1:
            divergence = (p.exp() * (p - q)).sum(-1)
        elif beta == 0:
            divergence = (q.exp() * (q - p)).sum(-1)
        else:
            from_teacher, from_student = ((x.exp() * (x - mixture)).sum(-1) for x in (q, p))
            divergence = beta * from_teacher + (1 - beta) * from_student
        mask = torch.tensor(row.mask)
        losses.append(divergence[mask].sum())
        counts.append(int(mask.sum()))
    if isinstance(aggregation, TokenMean):
        loss = sum(losses) / sum(counts)
    else:
        loss = sum(loss / count for loss, count in zip(losses, counts, strict=True)) / len(losses)
    loss.backward()
    return float(sum(losses).detach() / sum(counts)), {name: p.grad for name, p in student.named_parameters()}


def change(module):
    """Return the change of each weight of the student, divided by the rate: its negative gradient."""
    first = dict(STUDENT.causal().lm.named_parameters())
    return {name: (first[name] - p.detach()) / RATE for name, p in module.actor.lm.named_parameters()}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [None, 4])
def test_update_is_that_of_all_logits_at_once(beta, top_k, packing):
    module = distilled(divergence=Divergence(beta, top_k), packing=packing)
    loss, gradients = expected_gradients(beta, TokenMean(), top_k=top_k)
    assert_close(module.metrics["loss/distillation"], loss, rtol=1e-6)
    for name, value in change(module).items():
        assert_close(value, gradients[name], rtol=1e-8, atol=1e-11)


def test_losses_of_tokens_are_aggregated_as_configured():
    module = distilled(aggregation=SequenceMeanTokenMean())
    _, gradients = expected_gradients(1.0, SequenceMeanTokenMean())
    for name, value in change(module).items():
        assert_close(value, gradients[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("tokens", [5, 1000])
@pytest.mark.parametrize("memory_mb", [1, 150])
def test_update_does_not_depend_on_micro_batches(tokens, memory_mb):
    expected = change(distilled())
    actual = change(distilled(micro_batch_tokens=tokens, divergence=Divergence(memory_mb=memory_mb)))
    for name, value in actual.items():
        assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_excluded_responses_are_not_learnt_from():
    rollout = rollout_of(ROWS, dtype=torch.float64, temperature=0.7)
    rollout.included[1::2] = False
    _, gradients = expected_gradients(1.0, TokenMean(), ROWS[::2])
    for name, value in change(distilled(rollout=rollout)).items():
        assert_close(value, gradients[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("top_k", [None, 3])
def test_student_equal_to_its_teacher_does_not_change(top_k):
    module = distilled(STUDENT, divergence=Divergence(0.5, top_k))
    assert_close(module.metrics["loss/distillation"], 0.0, atol=1e-12)
    for value in change(module).values():
        assert_close(value, torch.zeros_like(value), atol=1e-10)


class ChangeAdapters(Callback):
    """Gives the adapters, which begin as 0, other weights before the first step."""

    def on_train_start(self, trainer, module):
        draw = torch.Generator().manual_seed(3)
        for name, parameter in module.actor.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5, generator=draw)


@pytest.mark.parametrize("top_k", [None, 10])
def test_student_with_adapters_learns_from_itself_without_them(top_k):
    sgd = partial(torch.optim.SGD, lr=0.0)
    student = replace(STUDENT, lora=LoRA(rank=2, alpha=4))
    module = DistillationModule(student, STUDENT, Divergence(1.0, top_k), optimizer=sgd)
    fit(module, [rollout_of(ROWS, dtype=torch.float64)], callbacks=[ChangeAdapters()])
    base, losses = STUDENT.causal().lm, []
    for row in ROWS:
        ids = torch.tensor([row.prompt + row.tokens])
        p, q = (lm(ids).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1) for lm in (module.actor.lm, base))
        losses.append((p.exp() * (p - q)).sum(-1)[torch.tensor(row.mask)].detach())
    assert "teacher" not in module.sources
    loss = module.trainer.callback_metrics["loss/distillation"]
    assert loss > 1e-2
    assert_close(loss, torch.cat(losses).mean(), rtol=1e-6)


def test_teacher_is_frozen_and_not_in_the_checkpoint():
    module = distilled()
    assert module.frozen_roles == ("teacher",)
    assert not any(p.requires_grad for p in module.teacher.parameters())


def test_metrics_are_those_of_the_teacher_and_not_of_advantages():
    rollout = replace(rollout_of(ROWS, dtype=torch.float64), rewards={})
    metrics = distilled(rollout=rollout).metrics
    assert {"loss/distillation", "policy/entropy", "rollout/logprob_diff_mean"} <= set(metrics)
    assert not [name for name in metrics if name.startswith(("advantage/", "return/", "reward/", "group/"))]
    assert "reward/given" in distilled().metrics


@pytest.mark.parametrize("top_k", [None, 3])
def test_entropy_is_the_students_own(top_k):
    entropies, lm = [], STUDENT.causal().lm
    for row in ROWS:
        logits = lm(torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1]
        p = (logits / 0.7).log_softmax(-1)  # at the temperature of the rollout
        entropies.append(-(p.exp() * p).sum(-1)[torch.tensor(row.mask)].detach())
    measured = distilled(divergence=Divergence(top_k=top_k)).metrics["policy/entropy"]
    assert_close(measured, torch.cat(entropies).mean(), rtol=1e-5)


def test_several_mini_batches_and_epochs_are_exact_for_the_engine_gap():
    metrics = distilled(minibatch_size=2, update_epochs=2).metrics
    assert metrics["policy/updates"] == 6
    assert_close(metrics["rollout/logprob_diff_mean"], distilled().metrics["rollout/logprob_diff_mean"], rtol=1e-12)


@pytest.mark.parametrize("top_k", [None, 3])
def test_held_out_divergence_is_logged(top_k):
    rollout = rollout_of(ROWS, dtype=torch.float64, temperature=0.7)

    class HandOverInValidation(Callback):
        def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
            module.receive(batch)

    module = DistillationModule(STUDENT, TEACHER, Divergence(top_k=top_k), optimizer=partial(torch.optim.SGD, lr=0.0))
    trainer = fit(module, [rollout], [rollout], callbacks=[HandOverInValidation()])
    loss, _ = expected_gradients(1.0, TokenMean(), top_k=top_k)
    assert_close(trainer.callback_metrics["val/divergence"], loss, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, r"beta of a divergence must lie in \[0, 1\], got 1.5"),
        ({"top_k": 0}, "top_k of a divergence must be at least 1 or null, got 0"),
        ({"memory_mb": 0}, "memory_mb of a divergence must be at least 1, got 0"),
    ],
)
def test_invalid_divergence_raises(options, message):
    with pytest.raises(UsageError, match=message):
        Divergence(**options)


def test_more_top_tokens_than_common_ones_raise():
    with pytest.raises(UsageError, match="top_k of the divergence is 12, but student and teacher have only 11 tokens"):
        distilled(divergence=Divergence(top_k=12))


# -- prompts of the teacher -------------------------------------------------------------------------------------------

PROMPTS = [[5, 3, 9, 9, 1][: 1 + number] for number in range(len(ROWS) - 1)] + [[5, 3]]


def with_teacher_prompts():
    rollout = rollout_of(ROWS, dtype=torch.float64, temperature=0.7)
    ids, lengths = pad_right(PROMPTS)
    return replace(rollout, teacher=PaddedPrompts(ids, lengths))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("top_k", [None, 4])
def test_teacher_reads_its_prompts(top_k, packing):
    module = distilled(rollout=with_teacher_prompts(), divergence=Divergence(0.3, top_k), packing=packing)
    _, gradients = expected_gradients(0.3, TokenMean(), top_k=top_k, teacher_prompts=PROMPTS)
    for name, value in change(module).items():
        assert_close(value, gradients[name], rtol=1e-8, atol=1e-11)


def test_student_is_its_own_teacher_with_another_prompt():
    module = distilled("actor", rollout=with_teacher_prompts(), divergence=Divergence(1.0, 4))
    assert module.frozen_roles == ()
    _, gradients = expected_gradients(1.0, TokenMean(), teacher=STUDENT, top_k=4, teacher_prompts=PROMPTS)
    for name, value in change(module).items():
        assert_close(value, gradients[name], rtol=1e-8, atol=1e-11)


def test_student_is_its_own_teacher_as_it_was_before_the_updates():
    once = distilled("actor", rollout=with_teacher_prompts(), divergence=Divergence(1.0, 4))
    frozen = distilled(STUDENT, rollout=with_teacher_prompts(), divergence=Divergence(1.0, 4), update_epochs=3)
    itself = distilled("actor", rollout=with_teacher_prompts(), divergence=Divergence(1.0, 4), update_epochs=3)
    for name, value in change(itself).items():
        assert_close(value, change(frozen)[name], rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(value, change(once)[name]) for name, value in change(itself).items())


def test_student_as_its_own_teacher_needs_top_tokens():
    with pytest.raises(UsageError, match="teacher: actor is evaluated before the updates"):
        DistillationModule(STUDENT, "actor")


def test_student_as_its_own_teacher_needs_other_prompts():
    class Loop(Callback):
        teacher_prompt = None

    with pytest.raises(UsageError, match="teacher: actor with the same prompt has nothing to teach"):
        fit(DistillationModule(STUDENT, "actor", Divergence(top_k=3)), [with_teacher_prompts()], callbacks=[Loop()])


# -- a teacher for each source ----------------------------------------------------------------------------------------

SECOND = TinyModel(dtype="float64", seed=9)


class Sources(LightningDataModule):
    """Data whose rows have three sources, one of them without rows in the step."""

    source_names = ("chat", "code", "math")

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def train_dataloader(self):
        return DataLoader([self.batch], batch_size=None)


def taught_by_source(teacher, source, top_k, **options):
    rollout = replace(with_teacher_prompts(), source=torch.tensor(source))
    sgd = partial(torch.optim.SGD, lr=RATE)
    module = DistillationModule(
        STUDENT,
        teacher,
        Divergence(0.3, top_k),
        optimizer=sgd,
        max_grad_norm=None,
        micro_batch_tokens=30,
        **options,
    )
    quiet_trainer(callbacks=[HandOver()]).fit(module, datamodule=Sources(rollout))
    return module


@pytest.mark.parametrize("top_k", [None, 4])
def test_each_source_has_its_teacher(top_k):
    source = [0, 2, 2, 0, 2, 0]
    module = taught_by_source({"chat": TEACHER, "code": STUDENT, "math": SECOND}, source, top_k)
    assert module.frozen_roles == ("teacher_chat", "teacher_code", "teacher_math")
    total = {}
    tokens = [sum(row.mask) for row in ROWS]
    for teacher, number in ((TEACHER, 0), (SECOND, 2)):
        rows = [row for row, each in enumerate(source) if each == number]
        _, gradients = expected_gradients(
            0.3, TokenMean(), [ROWS[row] for row in rows], teacher, top_k, [PROMPTS[row] for row in rows]
        )
        share = sum(tokens[row] for row in rows) / sum(tokens)
        for name, value in gradients.items():
            total[name] = total.get(name, 0) + share * value
    for name, value in change(module).items():
        assert_close(value, total[name], rtol=1e-8, atol=1e-11)


def test_one_source_may_be_taught_by_the_student_itself():
    source = [0, 2, 2, 0, 2, 0]
    itself = taught_by_source({"chat": "actor", "code": SECOND, "math": SECOND}, source, 4)
    frozen = taught_by_source({"chat": STUDENT, "code": SECOND, "math": SECOND}, source, 4)
    assert "teacher_chat" not in itself.sources
    for name, value in change(itself).items():
        assert_close(value, change(frozen)[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({}, "teacher must be a model, or one for each source of the prompts, got an empty dictionary"),
        ({"chat": TEACHER, "math": TEACHER}, "no teacher for the source 'code'"),
        ({"a-b": TEACHER, "a_b": TEACHER}, "differ only in characters other than letters and digits"),
    ],
)
def test_sources_without_teacher_raise(teacher, message):
    with pytest.raises(UsageError, match=message):
        taught_by_source(teacher, [0] * 6, None)


# -- other architectures, long texts and bfloat16 ---------------------------------------------------------------------


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "granite", "mamba"])
@pytest.mark.parametrize("top_k", [None, 5])
def test_architectures_that_are_no_llama_are_compared_by_their_own_logits(kind, top_k):
    rows = [Response([3, 4], [5, 6, 7, 2]), Response([3, 4], [8, 2]), Response([9], [1, 2, 3])]
    student, teacher = (FromConfig(tiny(kind), seed=seed) for seed in range(2))
    module = DistillationModule(student, teacher, Divergence(0.5, top_k), optimizer=partial(torch.optim.SGD, lr=0.0))
    module.metrics = fit(module, [rollout_of(rows, temperature=0.7)]).callback_metrics
    losses = []
    for row in rows:
        ids = torch.tensor([row.prompt + row.tokens])
        p, q = (
            (lm.lm(ids).logits[0, len(row.prompt) - 1 : -1] / 0.7).log_softmax(-1)
            for lm in (module.actor, module.teacher)
        )
        if top_k:
            ids = q.topk(top_k).indices
            p, q = (torch.cat([t := x.gather(-1, ids), (1 - t.exp().sum(-1, keepdim=True)).log()], -1) for x in (p, q))
        mixture = torch.logaddexp(p, q) - torch.tensor(2.0).log()
        losses.append(0.5 * ((q.exp() * (q - mixture)).sum(-1) + (p.exp() * (p - mixture)).sum(-1)))
    assert_close(module.metrics["loss/distillation"], torch.cat(losses).mean(), rtol=1e-3)


@pytest.mark.parametrize("top_k", [None, 5])
def test_bfloat16_is_close_to_float32(top_k, monkeypatch):
    monkeypatch.undo()  # bfloat16 needs the dtypes of the code
    torch.set_default_dtype(torch.float32)
    metrics = []
    for precision in ("32-true", "bf16-mixed"):
        sgd = partial(torch.optim.SGD, lr=0.1)
        module = DistillationModule(TinyModel(), TinyModel(seed=1), Divergence(0.5, top_k), optimizer=sgd)
        metrics.append(fit(module, [rollout_of(ROWS)], precision=precision).callback_metrics)
    assert_close(metrics[1]["loss/distillation"], metrics[0]["loss/distillation"], rtol=1e-2)
    assert abs(metrics[1]["grad_norm/actor"] / metrics[0]["grad_norm/actor"] - 1) < 0.03


@pytest.mark.parametrize("top_k", [None, 5])
def test_each_model_rounds_its_logits_as_configured(top_k, monkeypatch):
    monkeypatch.undo()  # bfloat16 needs the dtypes of the code
    torch.set_default_dtype(torch.float32)
    losses = set()
    for student, teacher in itertools.product([True, False], repeat=2):
        models = replace(TinyModel(), float32_logits=student), replace(TinyModel(seed=1), float32_logits=teacher)
        module = DistillationModule(*models, Divergence(0.5, top_k), optimizer=partial(torch.optim.SGD, lr=0.1))
        metrics = fit(module, [rollout_of(ROWS)], precision="bf16-mixed").callback_metrics
        losses.add(float(metrics["loss/distillation"]))
    assert len(losses) == 4  # each of the two options is read
    assert max(losses) - min(losses) < 0.01 * max(losses)


def test_text_of_5000_tokens_has_the_divergence_of_its_tokens():
    draw = torch.Generator().manual_seed(1)
    rows = [Response([3], torch.randint(3, 11, (size,), generator=draw).tolist()) for size in (5000, 3)]
    long = {**TINY_LLAMA, "max_position_embeddings": 5002, "num_hidden_layers": 1}
    student, teacher = (TinyModel(long, seed=seed) for seed in range(2))
    sgd = partial(torch.optim.SGD, lr=0.0)
    module = DistillationModule(student, teacher, optimizer=sgd, micro_batch_tokens=2048)
    loss = fit(module, [rollout_of(rows)]).callback_metrics["loss/distillation"]
    losses = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row.prompt + row.tokens])
            p, q = (role.lm(ids).logits[0, :-1].log_softmax(-1) for role in (module.actor, module.teacher))
            losses.append((p.exp() * (p - q)).sum(-1))
    assert_close(loss, torch.cat(losses).mean(), rtol=1e-4)


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_log_ratio_of_a_teacher_is_the_advantage_of_each_token(reward_coef):
    rollout = replace(rollout_of(ROWS, dtype=torch.float64), group=torch.tensor([0, 0, 0, 1, 1, 1]))
    advantages = TeacherLogRatio(rewards=RLOO() if reward_coef else None, reward_coef=reward_coef)
    module = RLHFModule(
        STUDENT,
        ref=TEACHER,
        advantages=advantages,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        max_grad_norm=None,
        micro_batch_tokens=30,
    )
    module.metrics = fit(module, [rollout]).callback_metrics
    student, teacher = STUDENT.causal().lm, TEACHER.causal().lm
    losses, count = 0.0, 0
    for number, row in enumerate(ROWS):
        p, q = (
            lm(torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
            for lm in (student, teacher)
        )
        p, q = (
            x.gather(-1, torch.tensor(row.tokens).unsqueeze(-1)).squeeze(-1)[torch.tensor(row.mask)] for x in (p, q)
        )
        others = rollout.reward[(rollout.group == rollout.group[number]) & (torch.arange(len(ROWS)) != number)]
        of_rewards = (rollout.reward[number] - others.mean()).double() if reward_coef else 0.0
        losses = losses - ((q - p).detach() * p + reward_coef * of_rewards * p).sum()
        count += len(p)
    (losses / count).backward()
    gradients = {name: p.grad for name, p in student.named_parameters()}
    for name, moved in change(module).items():
        assert_close(moved, gradients[name], atol=1e-9)
    if not reward_coef:
        assert "advantage/mean" in module.metrics
