"""Communicated bytes compared with the arguments of the libraries' collectives."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_rlhf.extras.plan import traffic as terms
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Work, strategy
from lightning_rlhf.extras.plan.traffic import all_gather, all_reduce, traffic
from lightning_rlhf.models.sequence_parallel import SequenceRanks
from tests.extras.plan.fakes import Sent, processes, sharded, source, texts

# One micro-batch of two texts of 32 tokens on each of 8 ranks, and no evaluation before the update.
WORK = Work(responses=16, minibatch_size=16, update_epochs=1, longest=32, micro_batch_tokens=64, evaluates_old=False)


def planned(kind, name, work=WORK, gpus=8, trained=True, engine=None, **options):
    split = options.get("tensor_parallel_size", 1)
    role = Role("actor", architecture(source(kind).hf_config(), tensor_parallel_size=split), trained)
    return traffic(Run([role], strategy(name, **options), work, engine), gpus)


def pass_through(role):
    sent = Sent()
    with sent:
        scores = role(*texts())
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    return sent.bytes


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_fsdp_gathers_and_scatters_the_planned_bytes(kind, mixed):
    with processes(8):
        sent = pass_through(sharded(source(kind).causal().train(), 8, mixed=mixed))
    work = Work(16, 16, 1, 32, 64, evaluates_old=False, mixed=mixed)
    plan = planned(kind, "rlhf_fsdp", work)
    assert plan[terms.FORWARD] + plan[terms.BACKWARD] == all_gather(sent["all_gather"], 8)
    assert plan[terms.SUMS] == all_gather(sent["reduce_scatter"], 8)
    assert sent["all_reduce"] == plan[terms.TENSORS] == 0


@pytest.mark.parametrize("reshards", [False, True])
def test_fsdp_gathers_for_the_backward_pass_what_it_freed(reshards):
    with processes(8):
        sent = pass_through(sharded(source("qwen2").causal().train(), 8, reshards=reshards))
    plan = planned("qwen2", "rlhf_fsdp", replace(WORK, mixed=False), reshards=reshards)
    assert plan[terms.FORWARD] + plan[terms.BACKWARD] == all_gather(sent["all_gather"], 8)
    assert plan[terms.BACKWARD] == reshards * plan[terms.FORWARD]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tensor_parallel_layers_sum_the_planned_bytes(checkpointing):
    role = source("qwen2").causal().train()
    if checkpointing:
        role.lm.gradient_checkpointing_enable({"use_reentrant": False})
    with processes(8):
        sent = pass_through(sharded(role, 8, split=2))
    work = Work(8, 8, 1, 32, 64, evaluates_old=False, mixed=False)
    plan = planned("qwen2", "rlhf_fsdp", work, tensor_parallel_size=2, checkpointing=checkpointing)
    assert plan[terms.TENSORS] == all_reduce(sent["all_reduce"], 2)
    assert plan[terms.FORWARD] + plan[terms.BACKWARD] == all_gather(sent["all_gather"], 4)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("kind", "size"), [("qwen2", 2), ("qwen2", 4), ("deepseek_v3", 2)])
def test_sequence_parallel_ranks_exchange_the_planned_bytes(kind, size, checkpointing):
    role = source(kind).causal().train()
    if checkpointing:
        role.lm.gradient_checkpointing_enable({"use_reentrant": False})
    with processes(8):
        role = sharded(role, 8)
        role.sequence_ranks = SequenceRanks(0, size, dist.new_group(list(range(size))))
        sent = pass_through(role)
    work = Work(
        2 * 8 // size, 2 * 8 // size, 1, 32, 64, evaluates_old=False, mixed=False
    )  # two texts on each data rank
    plan = planned(kind, "rlhf_fsdp", work, sequence_parallel_size=size, checkpointing=checkpointing)
    assert plan[terms.HEADS] == all_gather(sent["all_to_all"], size)
    assert plan[terms.FORWARD] + plan[terms.BACKWARD] == all_gather(sent["all_gather"], 8)
    assert plan[terms.SUMS] == all_gather(sent["reduce_scatter"], 8)


def test_ddp_sums_every_gradient_once_per_update():
    exchanged = []

    def exchange(state, bucket):
        exchanged.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with processes(8):
        engine = DistributedDataParallel(source("qwen2").causal(), gradient_as_bucket_view=True)
        engine.register_comm_hook(None, exchange)
        for sync in (False, True):
            with nullcontext() if sync else engine.no_sync():
                scores = engine(*texts())
                (scores.logprobs.sum() + scores.entropy.sum()).backward()
    two_micro_batches = Work(32, 32, 1, 32, 64, evaluates_old=False)
    assert planned("qwen2", "rlhf_ddp", two_micro_batches) == {terms.SUMS: all_reduce(sum(exchanged), 8)}


def test_zero_stages_by_hand():
    """8 ranks, P numbers, 3 epochs of 2 updates of 4 micro-batches, 8 micro-batches to evaluate; bfloat16 weights."""
    work = Work(responses=128, minibatch_size=64, update_epochs=3, longest=32, micro_batch_tokens=64)
    model = architecture(source("qwen2").hf_config())
    seventh = model.elements * 7 / 8
    padded = 8 * sum(-(-parameter.elements // 8) for parameter in model.parameters) * 7 / 8
    first, second, third = (planned("qwen2", f"rlhf_deepspeed_stage_{stage}", work) for stage in (1, 2, 3))
    assert first == {terms.SUMS: int(6 * 2 * 4 * seventh), terms.UPDATED: int(6 * 2 * seventh)}
    assert second == {terms.SUMS: int(24 * 2 * seventh), terms.UPDATED: int(6 * 2 * seventh)}
    assert third == {
        terms.FORWARD: int((8 + 24) * 2 * padded),
        terms.BACKWARD: int(24 * 2 * padded),
        terms.SUMS: int(24 * 2 * seventh),
    }


@pytest.mark.parametrize(("minibatch", "evaluated"), [(128, 0), (64, 4), (32, 6)])
def test_first_mini_batch_has_no_pass_for_old_log_probs(minibatch, evaluated):
    """8 ranks, 128 responses in 8 micro-batches, one epoch."""
    work = Work(128, minibatch, 1, 32, 64, reuses_first=True)
    own_pass = replace(work, reuses_first=False)
    passes, with_own = (planned("qwen2", "rlhf_deepspeed_stage_3", each)[terms.FORWARD] for each in (work, own_pass))
    assert passes / with_own == pytest.approx((8 + evaluated) / (8 + 8), rel=1e-6)


def test_frozen_roles_only_have_forward_passes_and_unsharded_ones_send_nothing():
    assert planned("qwen2", "rlhf_ddp", trained=False) == {}
    work = Work(16, 16, 1, 32, 64)
    assert set(planned("qwen2", "rlhf_fsdp", work, trained=False)) == {terms.FORWARD}


def test_gradients_are_summed_once_per_update_by_default():
    four = Work(64, 64, 1, 32, 64, evaluates_old=False)
    once, always = (planned("qwen2", "rlhf_fsdp", four, reduce_every=every)[terms.SUMS] for every in (False, True))
    assert always == pytest.approx(4 * once, rel=1e-9)


def test_engine_gets_the_weights_once_per_step():
    size = 2 * architecture(source("qwen2").hf_config()).elements
    engine = Engine(0.4, tensor_parallel_size=2, dtype="bfloat16")
    assert planned("qwen2", "rlhf_ddp", engine=engine)[terms.ENGINE] == size // 2
    assert terms.PUSH not in planned("qwen2", "rlhf_ddp", engine=engine)
    assert planned("qwen2", "rlhf_fsdp", engine=engine)[terms.PUSH] > 0


def test_only_adapters_are_pushed_to_an_engine_that_has_the_rest():
    actor = Role("actor", architecture(source("qwen2").hf_config()), trained=True, lora_rank=4)

    def sent(**options):
        run = Run([actor], strategy("rlhf_fsdp"), WORK, Engine(0.4, dtype="bfloat16", **options))
        plan = traffic(run, 8)
        return plan[terms.PUSH], plan[terms.ENGINE]

    assert sent(gets_adapters=True) == (all_gather(4 * actor.adapters, 8), 4 * actor.adapters)
    assert sent()[1] == 2 * actor.model.elements > 4 * actor.adapters


def test_actor_that_is_its_own_reference_is_evaluated_twice():
    work = Work(16, 16, 1, 32, 64)
    model = architecture(source("qwen2").hf_config())
    roles = [Role("actor", model, True, lora_rank=4, is_reference_too=both) for both in (False, True)]
    once, twice = (traffic(Run([role], strategy("rlhf_fsdp"), work), 8) for role in roles)
    assert twice[terms.FORWARD] == pytest.approx(1.5 * once[terms.FORWARD], rel=1e-9)
