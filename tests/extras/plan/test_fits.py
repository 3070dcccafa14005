"""Runs that fit, runs that do not, and the messages about them."""

from dataclasses import replace

import pytest

from benchmarks.scaling_tables import MODELS
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.memory import ACTIVATIONS, OPTIMIZER, PARAMETERS, TERMS
from lightning_rlhf.extras.plan.plan import _REMEDIES, GIB, first_changes, misfit_message, plan, smallest_gpu_count
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Work, strategy

SEVEN = architecture(MODELS["7B"].hf_config())
WORK = Work(responses=1024, minibatch_size=512, update_epochs=1, longest=2048, micro_batch_tokens=2048)


def run(name="rlhf_fsdp", work=WORK, capacity=80, engine=None, **options):
    split = options.get("tensor_parallel_size", 1)
    model = architecture(MODELS["7B"].hf_config(), tensor_parallel_size=split) if split > 1 else SEVEN
    return Run([Role("actor", model, trained=True)], strategy(name, **options), work, engine, capacity * GIB)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}])
@pytest.mark.parametrize("capacity", [24, 40, 80])
def test_smallest_number_fits_and_every_smaller_one_does_not(capacity, options):
    planned = run(checkpointing=True, reduce_every=True, capacity=capacity, **options)
    step = options.get("tensor_parallel_size", 1)
    fitting = [gpus for gpus in range(step, 33, step) if plan(planned, gpus).fits]
    assert smallest_gpu_count(planned) == fitting[0]


def test_smallest_number_need_not_be_a_power_of_two():
    runs = [run(checkpointing=True, reduce_every=True, capacity=capacity) for capacity in range(20, 80, 5)]
    assert {3, 5, 6, 7} & {smallest_gpu_count(planned) for planned in runs}


def test_message_gives_the_largest_term_and_the_smallest_number():
    planned = run(checkpointing=True, reduce_every=True, capacity=40)
    message = misfit_message(plan(planned, 2))
    assert message.startswith("does not fit on 2 GPUs of 40 GiB: each would need ")
    assert f"the largest part of it 28.4 GiB for {OPTIMIZER} (use more GPUs, offload it" in message
    number = smallest_gpu_count(planned)
    assert message.endswith(f"; with rlhf_fsdp, the smallest number of GPUs that it fits on is {number}")


@pytest.mark.slow
def test_message_has_the_settings_to_change_first():
    whole = run("rlhf_ddp", work=replace(WORK, micro_batch_tokens=16 * 2048), capacity=40)
    settings, changed = first_changes(whole, 16)
    assert settings[:2] == ["strategy: rlhf_fsdp", "activation_checkpointing: true"]
    assert changed.fits
    assert f"; change first: {', '.join(settings)}, with which each needs {changed.total / GIB:.1f} GiB; with" in (
        misfit_message(plan(whole, 16))
    )
    long = run(work=replace(WORK, longest=131072, micro_batch_tokens=131072), checkpointing=True, capacity=80)
    settings, changed = first_changes(long, 16)
    assert [each.partition(":")[0] for each in settings] == ["sequence_parallel_size"]
    assert changed.run.strategy.sequence_parallel_size in (2, 4, 8)
    other = replace(SEVEN, sequence_parallel=False)  # such as a model with images
    assert SEVEN.sequence_parallel
    without, _ = first_changes(replace(long, roles=[Role("actor", other, trained=True)]), 16)
    assert without == ["cpu_offload: true"]
    assert first_changes(run(capacity=4), 2) is None
    assert "change first" not in misfit_message(plan(run(capacity=4), 2))


def test_shards_lie_within_a_node_and_are_enlarged_if_they_do_not_fit():
    nodes = run(checkpointing=True, reduce_every=True, capacity=24, node_gpus=4)
    assert [nodes.strategy.replicas(ranks) for ranks in (2, 4, 8, 16)] == [1, 1, 2, 4]
    split = strategy("rlhf_fsdp", tensor_parallel_size=2, node_gpus=4)
    assert [split.replicas(ranks) for ranks in (1, 2, 4)] == [1, 1, 2]
    assert strategy("rlhf_deepspeed_stage_3", node_gpus=4).replicas(8) == 1

    assert not plan(nodes, 16).fits
    assert plan(nodes, 16).gpus_per_node == 4
    assert "(use a larger shard_size, offload it" in misfit_message(plan(nodes, 16))
    assert smallest_gpu_count(nodes) is None
    settings, changed = first_changes(nodes, 16)
    assert settings[-1] in ("shard_size: 8", "shard_size: 16")
    assert changed.fits
    few = run(checkpointing=True, reduce_every=True, capacity=80, node_gpus=4)
    assert smallest_gpu_count(few) == smallest_gpu_count(run(checkpointing=True, reduce_every=True, capacity=80)) <= 4


def test_message_has_the_shard_size_of_runs_that_need_the_gpus_of_several_nodes():
    needed = run(checkpointing=True, reduce_every=True, capacity=22)
    alone = smallest_gpu_count(needed)
    assert alone > 8
    of_nodes = replace(needed, strategy=replace(needed.strategy, node_gpus=8))
    assert misfit_message(plan(of_nodes, 8)).endswith(f"it fits on is {alone}, with shard_size: {alone}")
    assert misfit_message(plan(needed, 8)).endswith(f"it fits on is {alone}")


def test_message_for_a_fully_sharded_run_does_not_suggest_sharding():
    assert "shard" not in misfit_message(plan(run(checkpointing=True, reduce_every=True, capacity=40), 2))
    assert "shard" in misfit_message(plan(run("rlhf_ddp"), 2))


def test_message_without_a_sufficient_number():
    whole = run("rlhf_ddp")
    assert smallest_gpu_count(whole) is None
    assert misfit_message(plan(whole, 64)).endswith("; with rlhf_ddp, it fits on no number of such GPUs")
    sharded = run("rlhf_deepspeed_stage_3", Work(64, 4, 1, 2048, 2048), capacity=40)
    message = misfit_message(plan(sharded, 4))
    assert message.endswith("it fits on no number of such GPUs that a minibatch_size of 4 texts can use")


def test_more_gpus_never_need_more_memory():
    for name in ("rlhf_ddp", "rlhf_fsdp", "rlhf_deepspeed_stage_1", "rlhf_deepspeed_stage_2", "rlhf_deepspeed_stage_3"):
        totals = [plan(run(name), gpus).total for gpus in (1, 2, 8, 64, 512)]
        assert totals == sorted(totals, reverse=True), name


def test_checkpointing_and_shorter_micro_batches_shrink_activations():
    most, checkpointed = plan(run(), 8), plan(run(checkpointing=True), 8)
    assert checkpointed.memory[ACTIVATIONS] < 0.2 * most.memory[ACTIVATIONS]
    longer = Work(1024, 512, 1, 2048, 8192)
    assert plan(run(work=longer), 8).memory[ACTIVATIONS] == 4 * most.memory[ACTIVATIONS]


@pytest.mark.parametrize(
    ("planned", "gpus", "message"),
    [
        (("rlhf_single", {}), 2, "rlhf_single runs on one GPU, got 2: use rlhf_ddp"),
        (("rlhf_fsdp", {"tensor_parallel_size": 4}), 6, "tensor_parallel_size 4 does not divide 6 GPUs"),
        (("rlhf_fsdp", {"engine": Engine(0.4, 4)}), 6, "the engine's tensor_parallel_size 4 does not divide 6 GPUs"),
        (("rlhf_fsdp", {}), 1024, "a mini-batch of 512 texts leaves some of 1024 ranks without a text"),
    ],
)
def test_numbers_that_cannot_run_raise(planned, gpus, message):
    name, options = planned
    with pytest.raises(ValueError, match=f"^{message}"):
        plan(run(name, **options), gpus)


@pytest.mark.parametrize("name", ["rlhf_fsdp2", "rlhf_ddp_offload", "deepspeed_stage_2", "rlhf_deepspeed_stage_4"])
def test_unknown_strategy_raises(name):
    with pytest.raises(ValueError, match=f"got strategy '{name}'$"):
        strategy(name)


def test_only_fsdp_supports_tensor_parallelism():
    with pytest.raises(ValueError, match=r"^rlhf_ddp has no tensor parallelism: use rlhf_fsdp"):
        strategy("rlhf_ddp", tensor_parallel_size=2)


def test_only_fsdp_supports_sequence_parallelism():
    with pytest.raises(ValueError, match=r"^rlhf_deepspeed_stage_3 has no sequence parallelism: use rlhf_fsdp"):
        strategy("rlhf_deepspeed_stage_3", sequence_parallel_size=2)


def test_sequence_parallel_ranks_divide_activations_and_shard_weights():
    whole = plan(run(), 8)
    divided = plan(run(work=replace(WORK, micro_batch_tokens=4 * 2048), sequence_parallel_size=4), 8)
    assert divided.run.ranks(8) == 2
    assert divided.memory[ACTIVATIONS] == whole.memory[ACTIVATIONS]  # a quarter of four times as many tokens
    assert (divided.memory[OPTIMIZER], divided.memory[PARAMETERS]) == (
        whole.memory[OPTIMIZER],
        whole.memory[PARAMETERS],
    )
    with pytest.raises(ValueError, match="tensor_parallel_size times sequence_parallel_size, 4 does not divide 6 GPUs"):
        plan(run(sequence_parallel_size=4), 6)


def test_every_term_has_a_suggestion():
    assert _REMEDIES.keys() == set(TERMS)


def test_micro_batches_are_counted_for_the_longest_texts():
    work = Work(responses=100, minibatch_size=50, update_epochs=1, longest=100, micro_batch_tokens=450)
    assert (work.micro_batch_rows(50, 8), work.micro_batches(50, 8)) == (4, 2)  # 7 texts a rank, 4 to a micro-batch
    assert (work.micro_batch_rows(50, 16), work.micro_batches(50, 16)) == (4, 1)
    assert Work(10, 10, 1, 1000, 450).micro_batch_rows(10, 2) == 1  # a longer text still gets a separate one
