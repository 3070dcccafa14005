"""Plans of a distillation: passes of the teacher, memory of the logits, and gathered heads."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_rlhf import DistillationModule, FromConfig, MixtureModule
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.extras.algorithms.mixture import RewardObjective, TeacherObjective
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.command import roles_of
from lightning_rlhf.extras.plan.memory import LOGITS, moments
from lightning_rlhf.extras.plan.setup import Role, Run, Work, strategy
from lightning_rlhf.extras.plan.traffic import counts
from tests.extras.plan.fakes import source
from tests.stand_ins import TINY_LLAMA

# 64 texts in 4 mini-batches of 16, twice; 2 ranks have 8 texts of each, in 4 micro-batches of 2.
WORK = Work(
    responses=64,
    minibatch_size=16,
    update_epochs=2,
    longest=32,
    micro_batch_tokens=64,
    divergence_bytes=1 << 20,
    teachers_in_updates=True,
)


def roles():
    model = architecture(source("qwen2").hf_config())
    return [Role("actor", model, True), Role("teacher_math", model, False), Role("teacher", model, False, "bfloat16")]


def test_teachers_are_evaluated_in_each_update_or_once():
    actor, teacher, _ = roles()
    assert counts(teacher, WORK, 2).evaluations == 8 * 4
    assert counts(teacher, replace(WORK, teachers_in_updates=False), 2).evaluations == 16  # 32 texts, 2 at a time
    assert counts(actor, WORK, 2).trained == 8 * 4
    assert counts(Role("ref", teacher.model, False), WORK, 2).evaluations == 16


@pytest.mark.parametrize("name", ["rlhf_ddp", "rlhf_fsdp"])
def test_logits_are_those_of_a_chunk_and_heads_of_sharded_teachers_are_gathered(name):
    run = Run(roles(), strategy(name), WORK, None)
    model = run.roles[0].model
    heads = model.vocabulary * model.hidden * (4 + 2) if name == "rlhf_fsdp" else 0
    assert moments(run, 2)["the loss of the actor"][LOGITS] == (1 << 20) + heads
    once = replace(run, work=replace(WORK, teachers_in_updates=False))
    assert moments(once, 2)["the loss of the actor"][LOGITS] == 1 << 20


def test_roles_of_a_configuration_are_recognised_as_teachers():
    model = FromConfig(TINY_LLAMA)
    mixture = MixtureModule(model, {"a": RewardObjective(), "b": TeacherObjective(model)}, divergence=Divergence(0.5))
    for module in (DistillationModule(model, model), mixture):
        chosen = SimpleNamespace(tensor_parallel_size=1, sequence_parallel_size=1)
        assert [role.is_teacher for role in roles_of(module, chosen, False)] == [False, True]
