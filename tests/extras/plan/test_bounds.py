"""Host memory of a node and minimum seconds, in cases worked by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.scaling_tables import MODELS
from lightning_rlhf.extras.plan import bounds, memory, traffic
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.bounds import Cluster, Speeds
from lightning_rlhf.extras.plan.plan import plan
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Work, strategy
from tests.extras.plan.fakes import source

GIB = 1 << 30
SEVEN = architecture(MODELS["7B"].hf_config())
P = SEVEN.elements
ACTOR, REF = Role("actor", SEVEN, trained=True), Role("ref", SEVEN, trained=False)
WORK = Work(
    responses=1024, minibatch_size=1024, update_epochs=1, longest=1536, micro_batch_tokens=16384, response_tokens=1024
)
SPEEDS = Speeds(arithmetic=1e15, memory=1e12, bus=1e10, link=1e11, network=1e10)


def cluster(gpus):
    return Cluster(gpus, 8, SPEEDS)


ENGINE = Engine(0.4, dtype="bfloat16")


def run(name="rlhf_fsdp", engine=ENGINE, roles=(ACTOR, REF), **options):
    return Run(roles, strategy(name, checkpointing=True), WORK, engine, 80 * GIB, **options)


def test_host_memory_has_the_terms_of_all_gpus_of_a_node_and_the_weights_that_rank_0_loads():
    host = Counter({memory.PUSHED: 10, memory.SAVED: 3})
    node = bounds.node_memory(run(), host, 8)
    assert node == bounds.NodeMemory(training=8 * 13, loading=4 * P, exporting=4 * P)
    assert node.peak == 8 * 13 + 4 * P
    whole = bounds.node_memory(run("rlhf_ddp"), host, 8)  # each process loads; the first alone writes checkpoints
    assert whole == bounds.NodeMemory(training=8 * 10 + 3, loading=8 * 4 * P, exporting=4 * P)
    assert whole.peak == 8 * 4 * P
    half = run(roles=[replace(ACTOR, dtype="bfloat16")])
    assert bounds.node_memory(half, host, 8).loading == 4 * P  # trained: float32 masters
    frozen = run(roles=[ACTOR, replace(ACTOR, name="ref", trained=False, dtype="bfloat16")])
    assert bounds.node_memory(frozen, host, 8).loading == 4 * P


def test_push_gathers_and_transfers_twice():
    sent = Counter({traffic.PUSH: 7 * 10**10})
    seconds = bounds.push_seconds(run(), sent, cluster(8))
    assert seconds == pytest.approx(7e10 / 1e11 + 2 * (2 * P) / 1e10)
    split = run(engine=Engine(0.4, tensor_parallel_size=4, dtype="bfloat16"))
    assert bounds.push_seconds(split, Counter(), cluster(8)) == pytest.approx((2 * P + 2 * P // 4) / 1e10)
    assert bounds.push_seconds(run(), sent, cluster(16)) == pytest.approx(7e10 / 1e10 + 4 * P / 1e10)


def test_training_has_six_operations_per_parameter_and_token_and_eight_with_checkpointing():
    dense = P - 2 * 152064 * 3584 + 152064 * 3584  # without the embedding
    attention = 28 * 2 * 3584 * 1536
    tokens = 1024 * 1536 / 8  # of a rank; each row of 10 texts is 15,360 tokens, 13 rows for 128 texts
    rows = 13 * 10 / 128
    arithmetic, sent = bounds.learning_seconds(run(roles=[ACTOR]), Counter({traffic.SUMS: 5 * 10**11}), cluster(8))
    passes = 1 + 4  # old log-probabilities, update
    assert arithmetic == pytest.approx(rows * tokens * passes * (2 * dense + attention) / 1e15, rel=1e-3)
    assert sent == 5


def test_generation_reads_all_weights_for_each_token_of_each_round():
    assert bounds.generation_seconds(run(), 128, cluster(8)) == pytest.approx(1024 * 2 * P / 1e12)
    assert bounds.generation_seconds(run(), 64, cluster(8)) == pytest.approx(2 * 1024 * 2 * P / 1e12)
    split = run(engine=Engine(0.4, tensor_parallel_size=4, dtype="bfloat16"))
    assert bounds.generation_seconds(split, 512, cluster(8)) == pytest.approx(1024 * 2 * P / 4 / 1e12)


def test_adapters_have_a_backward_pass_of_one_forward_pass():
    """A frozen matrix has the gradient of its inputs, as many operations as its outputs have, and none of its own."""
    adapters = run(roles=[replace(ACTOR, lora_rank=16)])
    whole, _ = bounds.learning_seconds(run(roles=[ACTOR]), Counter(), cluster(8))
    arithmetic, _ = bounds.learning_seconds(adapters, Counter(), cluster(8))
    assert arithmetic == pytest.approx(whole * (1 + 3) / (1 + 4))  # old log-probs, and update with checkpointing


def test_mixture_of_experts_reads_its_active_experts_for_a_token():
    model = architecture(MODELS["MoE, 30B with 3B active"].hf_config())
    engine = Engine(0.4, dtype="bfloat16")
    seconds = bounds.generation_seconds(run(engine=engine, roles=[Role("actor", model, trained=True)]), 128, cluster(8))
    assert 2.9e9 < seconds * 1e12 / 1024 / 2 < 3.9e9  # weights, with the embedding


def test_mixture_of_experts_computes_with_its_active_experts():
    model = architecture(MODELS["MoE, 30B with 3B active"].hf_config())
    operations = bounds._forward_operations(Role("actor", model, trained=True), 0)
    assert 2 * 2.9e9 < operations < 2 * 3.4e9


def test_bounds_for_seven_billion_parameters_on_eight_gpus_by_hand():
    """For the update: 8 x 7.07e9 parameters x 197k tokens per GPU at the peak of an H100."""
    planned = plan(run(), 8)
    arithmetic, _ = bounds.learning_seconds(planned.run, planned.traffic, Cluster(8, 8))
    assert 10 < arithmetic < 20
    assert 0.4 < bounds.push_seconds(planned.run, planned.traffic, Cluster(8, 8)) < 1


@pytest.mark.parametrize("kind", ["qwen2", "deepseek_v3"])
def test_small_models_have_bounds(kind):
    small = Role("actor", architecture(source(kind).hf_config()), trained=True)
    assert bounds._forward_operations(small, 32) > 0


def test_replicas_store_as_few_ranks_do_and_send_only_gradients_over_the_network():
    whole, replicated = run(engine=None), run(engine=None)
    replicated = replace(replicated, strategy=replace(replicated.strategy, shard_size=8))
    assert memory.Shard.of(ACTOR, replicated, 64).elements == memory.Shard.of(ACTOR, run(engine=None), 8).elements
    sent, all_sharded = traffic.traffic(replicated, 64), traffic.traffic(whole, 64)
    assert all_sharded[traffic.REPLICAS] == 0
    # WORK has one update, whose 16 texts of a rank are two micro-batches of 10 texts; float32 gradients of P / 8.
    assert sent[traffic.REPLICAS] == pytest.approx(2 * 4 * 2 * P / 8 * 7 / 8, rel=1e-4)
    assert sent[traffic.FORWARD] == pytest.approx(all_sharded[traffic.FORWARD] * (7 / 8) / (63 / 64), rel=1e-4)
    _, seconds = bounds.learning_seconds(replicated, sent, cluster(64))
    inside = sent.total() - sent[traffic.REPLICAS]
    assert seconds == pytest.approx(inside / SPEEDS.link + sent[traffic.REPLICAS] / SPEEDS.network)
    assert seconds < bounds.learning_seconds(whole, all_sharded, cluster(64))[1] / 2


def test_shard_size_must_divide_the_ranks():
    chosen = strategy("rlhf_fsdp", shard_size=8)
    with pytest.raises(ValueError, match="shard_size 8 does not divide 12 data-parallel ranks"):
        chosen.replicas(12)
