"""Host memory of a node and minimum seconds, in cases worked by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.scaling_tables import MODELS
from lightning_rlhf.extras.plan import bounds, memory, traffic
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.bounds import Cluster, Speeds
from lightning_rlhf.extras.plan.node_memory import NodeMemory, node_memory
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
    node = node_memory(run(), host, 8)
    assert node == NodeMemory(training=8 * 13, loading=4 * P, exporting=4 * P)
    assert node.peak == 8 * 13 + 4 * P
    whole = node_memory(run("rlhf_ddp"), host, 8)  # each process loads; the first alone writes checkpoints
    assert whole == NodeMemory(training=8 * 10 + 3, loading=8 * 4 * P, exporting=4 * P)
    assert whole.peak == 8 * 4 * P
    for stage, ranks in ((1, 8), (2, 8), (3, 1)):  # ZeRO-3 alone keeps parts of the weights
        zero = node_memory(run(f"rlhf_deepspeed_stage_{stage}"), host, 8)
        assert zero == NodeMemory(training=8 * 13, loading=ranks * 4 * P, exporting=4 * P)
    half = run(roles=[replace(ACTOR, dtype="bfloat16")])
    assert node_memory(half, host, 8).loading == 4 * P  # trained: float32 masters
    frozen = run(roles=[ACTOR, replace(ACTOR, name="ref", trained=False, dtype="bfloat16")])
    assert node_memory(frozen, host, 8).loading == 4 * P


def test_push_gathers_and_transfers_twice():
    sent = Counter({traffic.PUSH: 7 * 10**10})
    seconds = bounds.push_seconds(run(), sent, cluster(8))
    assert seconds == pytest.approx(2 * (2 * P) / 1e10)  # each tensor is copied while the next one is gathered
    split = run(engine=Engine(0.4, tensor_parallel_size=4, dtype="bfloat16"))
    assert bounds.push_seconds(split, Counter(), cluster(8)) == pytest.approx((2 * P + 2 * P // 4) / 1e10)
    slow = Counter({traffic.PUSH: 7 * 10**11})
    assert bounds.push_seconds(run(), slow, cluster(16)) == pytest.approx(7e11 / 8e10 + 2 * P / 1e10)


EMBEDDING = 152064 * 3584
LAYERS = P - 2 * EMBEDDING  # and norms and biases, a thousandth


def test_training_has_six_operations_per_weight_and_token_and_eight_with_checkpointing():
    """128 texts of a rank, of 512 and 1,024 tokens; each token of the response has log-probs."""
    pairs = 1536 * 1536 / 2  # of a token and an earlier one
    layers = 2 * (1536 * LAYERS + pairs * 28 * 2 * 3584)
    head = 2 * 1024 * EMBEDDING
    learning = bounds.learning_seconds(run(roles=[ACTOR]), cluster(8))
    passes, of_head = 1 + 4, 1 + 3  # old log-probabilities, and the update, which recomputes layers and no head
    assert learning.arithmetic == pytest.approx(128 * (passes * layers + of_head * head) / 1e15, rel=1e-3)
    whole = traffic.traffic(run(roles=[ACTOR]), 8)
    sent = whole.total() - whole[traffic.PUSH] - whole[traffic.ENGINE]
    assert learning.communication == pytest.approx(sent / 1e11)
    assert learning.least == max(learning.arithmetic, learning.communication)


def test_a_rank_with_five_texts_computes_no_padding():
    """Packing fills micro-batches of 10 texts; the last one has those that are left."""
    five = replace(run(roles=[ACTOR]), work=replace(WORK, responses=40, minibatch_size=40))
    many = bounds.learning_seconds(run(roles=[ACTOR]), cluster(8)).arithmetic
    assert bounds.learning_seconds(five, cluster(8)).arithmetic == pytest.approx(many * 5 / 128)


def test_a_prompt_counts_once_for_the_texts_that_share_it():
    shared = replace(run(roles=[ACTOR]), work=replace(WORK, group_size=8, shares_prompts=True))
    tokens = 1024 + 512 / 8
    pairs = 512 * 512 / 2 / 8 + 1024 * 512 + 1024 * 1024 / 2
    layers, head = 2 * (tokens * LAYERS + pairs * 28 * 2 * 3584), 2 * 1024 * EMBEDDING
    learning = bounds.learning_seconds(shared, cluster(8))
    assert learning.arithmetic == pytest.approx(128 * (5 * layers + 4 * head) / 1e15, rel=1e-3)
    # 15 texts of 1,088 tokens fit into a micro-batch, and 10 of 1,536: 9 micro-batches instead of 13.
    alone = bounds.learning_seconds(run(roles=[ACTOR]), cluster(8))
    assert learning.communication == pytest.approx(alone.communication * 9 / 13, rel=0.02)


def test_head_of_given_texts_and_of_scalar_models_counts_nothing():
    def operations(role, **changes):
        work = replace(WORK, **changes)
        return bounds._head_operations(role, work)

    assert operations(ACTOR) == 2 * 1024 * EMBEDDING
    assert operations(ACTOR, response_tokens=0) == operations(ACTOR, turns=4) == 0
    assert operations(replace(ACTOR, model=replace(SEVEN, vocabulary=0))) == 0


def test_teacher_in_updates_evaluates_the_rows_of_mini_batches():
    teacher = replace(REF, name="teacher")
    work = replace(WORK, minibatch_size=8, teachers_in_updates=True)
    counted = traffic.counts(teacher, work, 8)
    assert (counted.evaluations, counted.evaluated_rows) == (128, 128)


@pytest.mark.parametrize(
    ("term", "speed"),
    [
        (traffic.TENSORS, SPEEDS.link),  # within a node
        (traffic.HEADS, 2 * SPEEDS.network),  # every fourth of the 16 GPUs with the same rows, two in each node
        (traffic.SUMS, 2 * SPEEDS.network),
        (traffic.PUSH, 8 * SPEEDS.network),  # all eight pass a part
        (traffic.REPLICAS, SPEEDS.network),  # one GPU of each replica
    ],
)
def test_speed_is_that_of_the_links_which_the_gpus_of_a_node_have_together(term, speed):
    split = strategy("rlhf_fsdp", tensor_parallel_size=4, sequence_parallel_size=4, shard_size=1)
    assert bounds._bytes_per_second(replace(run(), strategy=split), term, cluster(32)) == speed


def test_generation_reads_all_weights_but_the_embedding_for_each_token_of_each_round():
    read = 2 * (P - EMBEDDING)
    assert bounds.generation_seconds(run(), 128, cluster(8)) == pytest.approx(1024 * read / 1e12, rel=1e-3)
    # A text occupies 512 tokens at its first step and 1,536 at its last, and the cache has less than 64 times 1,536.
    steps = 128 * (1024 * 512 + 1024 * 1024 / 2) / (64 * 1536)
    assert 1024 < steps < 2048
    assert bounds.generation_seconds(run(), 63, cluster(8)) == pytest.approx(steps * read / 1e12, rel=1e-3)
    split = run(engine=Engine(0.4, tensor_parallel_size=4, dtype="bfloat16"))
    assert bounds.generation_seconds(split, 512, cluster(8)) == pytest.approx(1024 * read / 4 / 1e12, rel=1e-3)


def test_adapters_have_a_backward_pass_of_one_forward_pass():
    """A frozen matrix has the gradient of its inputs, as many operations as its outputs have, and none of its own."""
    adapters = run(roles=[replace(ACTOR, lora_rank=16)])
    whole, frozen = (bounds.learning_seconds(each, cluster(8)).arithmetic for each in (run(roles=[ACTOR]), adapters))
    matrices, head = bounds._matrix_operations(ACTOR, WORK), bounds._head_operations(ACTOR, WORK)
    assert (whole - frozen) * 1e15 == pytest.approx(128 * (matrices + head))  # attention has no weights


def test_mixture_of_experts_reads_its_active_experts_for_a_token():
    model = architecture(MODELS["MoE, 30B with 3B active"].hf_config())
    engine = Engine(0.4, dtype="bfloat16")
    seconds = bounds.generation_seconds(run(engine=engine, roles=[Role("actor", model, trained=True)]), 128, cluster(8))
    assert 2.9e9 < seconds * 1e12 / 1024 / 2 < 3.4e9  # weights


def test_mixture_of_experts_computes_with_its_active_experts():
    model = architecture(MODELS["MoE, 30B with 3B active"].hf_config())
    head = model.vocabulary * model.hidden
    assert 2.9e9 < bounds._passed_weights(model) + head < 3.4e9


def test_bounds_for_seven_billion_parameters_on_eight_gpus_by_hand():
    """For the update: 8 x 7.07e9 parameters x 197k tokens per GPU at the peak of an H100."""
    planned = plan(run(), 8)
    assert 10 < bounds.learning_seconds(planned.run, Cluster(8, 8)).arithmetic < 20
    assert 0.4 < bounds.push_seconds(planned.run, planned.traffic, Cluster(8, 8)) < 1


@pytest.mark.parametrize(("kind", "fields"), [("qwen2", {}), ("deepseek_v3", {"v_head_dim": 8})])
def test_attention_counts_the_widths_of_queries_and_outputs(kind, fields):
    model = architecture(source(kind, **fields).hf_config())
    small, one = Role("actor", model, trained=True), replace(WORK, longest=2, response_tokens=0)
    attention = bounds._attention_operations(small, one)
    widths = sum(layer.query + (layer.output or layer.query) for layer in model.layers)
    assert attention == pytest.approx(2 * 2 * widths)  # two pairs: a token with itself counts as half
    assert (kind == "deepseek_v3") == any(layer.output not in (0, layer.query) for layer in model.layers)


def test_replicas_store_as_few_ranks_do_and_send_only_gradients_over_the_network():
    whole, replicated = run(engine=None), run(engine=None)
    replicated = replace(replicated, strategy=replace(replicated.strategy, shard_size=8))
    assert memory.Shard.of(ACTOR, replicated, 64).elements == memory.Shard.of(ACTOR, run(engine=None), 8).elements
    sent, all_sharded = traffic.traffic(replicated, 64), traffic.traffic(whole, 64)
    assert all_sharded[traffic.REPLICAS] == 0
    # WORK has one update, whose two micro-batches are summed before; float32 gradients of P / 8.
    assert sent[traffic.REPLICAS] == pytest.approx(4 * 2 * P / 8 * 7 / 8, rel=1e-4)
    assert sent[traffic.FORWARD] == pytest.approx(all_sharded[traffic.FORWARD] * (7 / 8) / (63 / 64), rel=1e-4)
    seconds = bounds.learning_seconds(replicated, cluster(64)).communication
    between = all_sharded.total() - all_sharded[traffic.PUSH] - all_sharded[traffic.ENGINE]
    all_sharded_seconds = between / (8 * SPEEDS.network)
    inside = sent.total() - sent[traffic.REPLICAS]
    assert seconds == pytest.approx(max(inside / SPEEDS.link, sent[traffic.REPLICAS] / SPEEDS.network))
    assert bounds.learning_seconds(whole, cluster(64)).communication == pytest.approx(all_sharded_seconds)


def test_shard_size_must_divide_the_ranks():
    chosen = strategy("rlhf_fsdp", shard_size=8)
    with pytest.raises(ValueError, match="shard_size 8 does not divide 12 data-parallel ranks"):
        chosen.replicas(12)
