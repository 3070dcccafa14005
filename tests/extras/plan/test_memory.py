"""Terms of memory compared with torch, and with cases worked by hand."""

from dataclasses import replace
from functools import partial

import bitsandbytes
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_rlhf import GRPOModule, PPOModule, Pretrained
from lightning_rlhf.extras.plan import memory as terms
from lightning_rlhf.extras.plan import partition
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.command import roles_of
from lightning_rlhf.extras.plan.memory import Shard, cache_bytes, engine_bytes, memory, moments
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Work, Zero, strategy
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.models.master_weights import use_master_weights
from lightning_rlhf.strategies.checkpoints.background import in_host_memory
from lightning_rlhf.strategies.checkpoints.role_state import native_state
from tests.distributed.tasks import weight_bytes
from tests.extras.plan.fakes import processes, sharded, source, texts

MODEL = architecture(source("qwen2").hf_config())
ACTOR, REF = Role("actor", MODEL, trained=True), Role("ref", MODEL, trained=False)
CRITIC = Role("critic", MODEL, trained=True)  # with the shapes of the actor
P = MODEL.elements
WORK = Work(responses=64, minibatch_size=32, update_epochs=1, longest=32, micro_batch_tokens=64)
NAMES = (
    "rlhf_ddp", "rlhf_fsdp", "rlhf_deepspeed_stage_1", "rlhf_deepspeed_stage_2", "rlhf_deepspeed_stage_3",
)  # fmt: skip


def held(role, name, ranks=8, mixed=True, micro_batches=2, **options):
    """Return bytes of parameters, optimizer state, and permanent and temporary gradients."""
    shard = Shard(role, strategy(name, **options), ranks, mixed)
    resting = shard.resting()
    return resting[terms.PARAMETERS], resting[terms.OPTIMIZER], *shard.gradients(micro_batches)


def trained_model(dtype):
    """Return a model as a module builds it for a trained role."""
    model = source("qwen2", dtype).causal()
    if dtype == "bfloat16":
        use_master_weights(model)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_step_of_adamw_has_the_planned_state_and_no_copy(dtype):
    model = trained_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # which modules set on a GPU
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    averages = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    parameters, state, _, passing = held(Role("actor", MODEL, True, dtype), "rlhf_single", mixed=False)
    assert state == sum(average.nbytes for average in averages)
    assert parameters == passing == sum(parameter.nbytes for parameter in model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        optimizer.step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    assert peak["Total"] == pytest.approx(parameters + passing + state, rel=0.01)
    single = moments(Run([Role("actor", MODEL, True, dtype)], strategy("rlhf_single"), WORK), 1)
    assert not single["the optimizer's step of the actor"][terms.STEP]


def test_bytes_by_hand():
    """Parameters, optimizer state, permanent gradients, gradients during the update; the models have P numbers."""
    flat = -(-P // 16) * 2
    fsdp = partition.fsdp_elements(MODEL.parameters, 8)
    zero = partition.zero3_elements(MODEL.parameters, 8)
    assert held(ACTOR, "rlhf_single") == (4 * P, 8 * P, 0, 4 * P)
    assert held(ACTOR, "rlhf_ddp") == (4 * P, 8 * P, 4 * P, 0)
    assert held(ACTOR, "rlhf_deepspeed_stage_1") == (2 * P, 12 * flat, 4 * P, 2 * P)
    assert held(ACTOR, "rlhf_deepspeed_stage_1", mixed=False) == (4 * P, 12 * flat, 0, 4 * P)
    assert held(ACTOR, "rlhf_deepspeed_stage_2") == (2 * P, 12 * flat, 0, 4 * flat)
    # Every parameter of a model this small is below the threshold, and stays gathered.
    assert held(ACTOR, "rlhf_deepspeed_stage_3") == (2 * (zero + P), 12 * zero, 4 * zero, 0)
    assert held(ACTOR, "rlhf_fsdp", micro_batches=1) == (4 * fsdp, 8 * fsdp, 0, 4 * fsdp)
    assert held(ACTOR, "rlhf_fsdp") == (4 * fsdp, 8 * fsdp, 0, 4 * fsdp)
    assert held(ACTOR, "rlhf_fsdp", reduce_every=False) == (4 * fsdp, 8 * fsdp, 0, 4 * fsdp + 4 * P)
    # Trained weights in bfloat16 have float32 masters, which are the stored weights outside DeepSpeed.
    for name in ("rlhf_single", "rlhf_ddp", "rlhf_fsdp", "rlhf_deepspeed_stage_1", "rlhf_deepspeed_stage_3"):
        assert held(replace(ACTOR, dtype="bfloat16"), name, mixed=False) == held(ACTOR, name, mixed=True)


@pytest.mark.parametrize("name", NAMES)
def test_frozen_roles_have_neither_gradients_nor_optimizer(name):
    parameters, *rest = held(REF, name)
    assert parameters == held(ACTOR, name)[0]
    assert rest == [0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_only_adapters_have_gradients_and_optimizer(name):
    """Rank 4: 4 x (inputs + outputs) of the seven matrices of each of two layers."""
    lora = replace(ACTOR, lora_rank=4)
    adapters = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))
    assert lora.adapters == adapters
    parameters, state, always, passing = held(lora, name)
    bytes_of_state = 12 if "deepspeed" in name else 8
    assert state == bytes_of_state * (adapters if name == "rlhf_ddp" else partition.flat_elements(adapters, 8))
    assert 0 < always + passing <= 6 * adapters + 8
    assert 0 < parameters - held(REF, name)[0] <= 4 * adapters


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("reshards", [None, False])
def test_peak_of_fsdp_agrees_with_the_plan(mixed, reshards):
    """Measured by torch's tracker for 8 ranks, two micro-batches that both reduce: 5 to 7 % below the plan."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 2000}
    made_of = source("qwen2", **sizes)
    model = architecture(made_of.hf_config())
    with processes(8):
        role = sharded(made_of.causal().train(), 8, mixed=mixed, reshards=reshards)
        tracker = FSDPMemTracker(role)
        with tracker:
            for _ in range(2):
                scores = role(*texts(2, 16))
                loss = scores.logprobs.sum() + scores.entropy.sum()
                del scores
                loss.backward()
                tracker.reset_mod_stats()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    work = Work(16, 16, 1, 16, 32, mixed=mixed)
    chosen = strategy("rlhf_fsdp", reduce_every=True, reshards=reshards)
    used, _, _ = memory(Run([Role("actor", model, True)], chosen, work), 8)
    planned = used.total() - used[terms.RUNTIME] - used[terms.OPTIMIZER]
    assert 0.9 < planned / peak["Total"] < 1.1
    by_name = {str(kind).rpartition(".")[2]: size for kind, size in peak.items()}
    assert by_name["SHARDED_PARAM"] == used[terms.PARAMETERS]
    assert by_name["SHARDED_GRAD"] == used[terms.GRADIENTS]


def test_gathered_weights_by_hand():
    """In the loss, in a layer, at the end; the formulas are in the docstring of the tested function."""
    units = {unit: sum(p.elements for p in parameters) for unit, parameters in MODEL.units.items()}
    rest, layer, head = units[None], units[0], 97 * 64

    def passing(role, name, mixed=True, **options):
        return Shard(role, strategy(name, **options), 8, mixed).gathered()

    assert passing(REF, "rlhf_fsdp") == (2 * rest, 2 * (rest + 2 * layer), 0)
    in_a_layer = 2 * (rest + 2 * layer) + 2 * (head + layer) + 4 * layer
    assert passing(ACTOR, "rlhf_fsdp") == (2 * (rest + head), in_a_layer, 8 * rest)
    whole = passing(ACTOR, "rlhf_fsdp", reshards=False)
    assert whole == (2 * (P + head), 2 * P + max(4 * layer, 2 * head + 4 * layer), 8 * rest)
    assert passing(REF, "rlhf_fsdp", reshards=False) == passing(REF, "rlhf_fsdp")
    assert passing(ACTOR, "rlhf_deepspeed_stage_2") == (
        2 * P,
        2 * P,
        0,
    )  # a bucket is at most as large as the gradients
    assert passing(ACTOR, "rlhf_deepspeed_stage_2", zero=Zero(bucket=7)) == (14, 14, 0)
    assert Zero().bucket_of(10**9) == 5 * 10**8
    assert passing(ACTOR, "rlhf_deepspeed_stage_3") == (4 * P, 4 * P, 0)
    assert passing(REF, "rlhf_deepspeed_stage_3", zero=Zero(live=100, prefetch=20)) == (240, 240, 0)
    assert passing(REF, "rlhf_deepspeed_stage_3") == (2 * P, 2 * P, 0)
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 192 * 64
    assert passing(ACTOR, "rlhf_ddp") == (2 * (2 * matrices + head), 2 * 2 * matrices, 0)
    assert passing(ACTOR, "rlhf_ddp", checkpointing=True) == (2 * head, 2 * matrices, 0)
    assert passing(ACTOR, "rlhf_ddp", mixed=False) == (0, 0, 0)


def test_roles_take_turns_in_memory_but_their_optimizers_do_not():
    critic = Role("critic", architecture(source("qwen2").hf_config(), scalar=True), trained=True)
    one, _, _ = memory(Run([ACTOR], strategy("rlhf_fsdp", reduce_every=True), WORK), 8)
    two, _, when = memory(Run([ACTOR, critic], strategy("rlhf_fsdp", reduce_every=True), WORK), 8)
    for term in (terms.GRADIENTS, terms.ACTIVATIONS, terms.LOGITS, terms.GATHERED):
        assert two[term] == one[term]
    assert two[terms.OPTIMIZER] > 1.7 * one[terms.OPTIMIZER]
    assert when.endswith("of the actor")


@pytest.mark.parametrize(
    ("name", "on_the_host"),
    [
        ("rlhf_deepspeed_stage_1_offload", {terms.OPTIMIZER}),
        ("rlhf_deepspeed_stage_2_offload", {terms.OPTIMIZER, terms.GRADIENTS}),
        ("rlhf_deepspeed_stage_3_offload", {terms.OPTIMIZER, terms.GRADIENTS, terms.PARAMETERS}),
        ("rlhf_fsdp_offload", {terms.OPTIMIZER, terms.GRADIENTS, terms.PARAMETERS}),
    ],
)
def test_offloading_moves_terms_to_the_host(name, on_the_host):
    options = {"reduce_every": True} if name == "rlhf_fsdp_offload" else {}
    used, host, _ = memory(Run([ACTOR, REF], strategy(name, **options), WORK), 8)
    whole, before, _ = memory(Run([ACTOR, REF], strategy(name.removesuffix("_offload"), **options), WORK), 8)
    assert set(host) - {terms.SAVED, terms.ROUNDED} == on_the_host
    assert set(before) <= {terms.SAVED}
    assert all(used[term] == 0 and host[term] == whole[term] for term in on_the_host)


def test_only_frozen_roles_can_be_offloaded():
    _, host, _ = memory(Run([ACTOR, REF], strategy("rlhf_deepspeed_stage_3", offload_frozen=True), WORK), 8)
    assert host.pop(terms.SAVED) == 12 * partition.zero3_elements(MODEL.parameters, 8)
    held_bytes = held(REF, "rlhf_deepspeed_stage_3")[0]
    assert host == {terms.PARAMETERS: held_bytes, terms.ROUNDED: terms.page_rounding([held_bytes])}


def test_page_locked_tensors_are_rounded_to_powers_of_two():
    assert terms.page_rounding([1, 2, 3, 1024, 1025, 0]) == 0 + 0 + 1 + 0 + 1023 + 0
    run = Run([ACTOR, REF], strategy("rlhf_single", offload_idle=True), WORK)
    _, host, _ = memory(run, 1)
    moments = [4 * parameter.elements for parameter in MODEL.trained] * 2  # of Adam
    weights = [4 * parameter.elements for parameter in MODEL.parameters]  # of the reference
    assert host[terms.ROUNDED] == terms.page_rounding([*moments, *weights])


def test_offloaded_activations_are_on_the_host_but_those_of_a_layer():
    run = Run([ACTOR, CRITIC], strategy("rlhf_single", activation_offload=True), WORK)
    one_pass = terms.pass_of(Shard.of(ACTOR, run, 1), WORK, 1)
    _, host, _ = memory(run, 1)
    assert host[terms.ACTIVATIONS] == one_pass.kept_bytes()  # of one role: they compute in turn
    state = one_pass.tokens * MODEL.hidden * 4
    assert host[terms.ROUNDED] == one_pass.kept_bytes() * terms.page_rounding([state]) // state
    loss = terms.moments(run, 1)["the loss of the actor"]
    assert loss[terms.ACTIVATIONS] == one_pass.layer_kept_bytes() < one_pass.kept_bytes()
    _, host, _ = memory(replace(run, strategy=strategy("rlhf_single")), 1)
    assert not host[terms.ACTIVATIONS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_background_save_copies_the_planned_bytes(dtype):
    model = trained_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    saved = in_host_memory(native_state(model, optimizer)).tensors.values()
    role = Role("actor", MODEL, True, dtype)
    run = Run([role, REF], strategy("rlhf_single"), replace(WORK, mixed=False), background_save=True)
    _, host, _ = memory(run, 1)
    assert host == {terms.SAVED: sum(tensor.nbytes for tensor in saved if tensor.ndim)}
    assert not memory(Run([role, REF], strategy("rlhf_single"), WORK), 1)[1]


def test_planned_copy_of_a_checkpoint_by_hand():
    def saved(name, role=ACTOR):
        return memory(Run([role], strategy(name), WORK, background_save=True), 8)[1][terms.SAVED]

    assert saved("rlhf_ddp") == 12 * P
    assert saved("rlhf_fsdp") == 12 * partition.fsdp_elements(MODEL.parameters, 8)
    assert saved("rlhf_deepspeed_stage_2") == 12 * -(-P // 16) * 2
    assert saved("rlhf_ddp", REF) == 0


def test_engine_fills_its_share_with_cache():
    engine = Engine(0.5, tensor_parallel_size=2, dtype="bfloat16")
    used = engine_bytes(engine, ACTOR, WORK, capacity=10**9)
    hidden, inner, tokens = MODEL.hidden, MODEL.layers[0].dense, 8192
    activations = max(2 * tokens * (4 * hidden + 3 * inner // 2), 3 * 4 * 256 * MODEL.vocabulary)
    assert used == {terms.ENGINE: P, terms.ENGINE_PASS: activations, terms.CACHE: 5 * 10**8 - P - activations}
    assert engine_bytes(engine, ACTOR, WORK, capacity=80 << 30)[terms.ENGINE_PASS] == 2 * activations
    assert cache_bytes(engine, ACTOR) == 2 * 2 * 2 * 32 // 2  # keys and values, two bytes, two layers, 32 wide
    latent = Role("actor", architecture(source("deepseek_v3").hf_config()), trained=True)
    assert cache_bytes(engine, latent) == 2 * 2 * (24 + 8)  # whole on both GPUs
    assert engine_bytes(Engine(0.0, sequences=3), ACTOR, WORK, 0)[terms.CACHE] == 3 * 32 * 2 * 4 * 2 * 32
    # A fraction too small for the weights and one text is not made to fit.
    assert engine_bytes(engine, ACTOR, WORK, capacity=0)[terms.CACHE] == 32 * cache_bytes(engine, ACTOR)


def test_sleeping_engine_needs_no_memory_during_training(monkeypatch):
    monkeypatch.setattr(terms, "_ENGINE_PASSES", ((0, 1, 1),))

    def planned(share, sleeps, *roles):
        engine = Engine(share, dtype="bfloat16", sleeps=sleeps)
        return memory(Run([ACTOR, *roles], strategy("rlhf_fsdp"), WORK, engine, capacity=2**32), 8)

    awake, _, peak = planned(0.5, sleeps=False)
    small, _, small_peak = planned(2**-20, sleeps=True)
    assert small_peak == peak != "generation"
    assert not small[terms.ENGINE]
    assert small.total() == awake.total() - 2**31
    large, host, large_peak = planned(0.5, sleeps=True)
    assert large_peak == "generation"
    assert large[terms.ENGINE] + large[terms.ENGINE_PASS] + large[terms.CACHE] == 2**31
    assert not large[terms.ACTIVATIONS]
    validated, _, _ = planned(0.5, True, REF)  # frozen models compute in validations, while the engine is awake
    assert validated[terms.ACTIVATIONS] > 0
    assert large[terms.PARAMETERS] == awake[terms.PARAMETERS]
    assert host[terms.PUSHED] == 2 * ACTOR.model.elements


def test_idle_offloaded_roles_are_counted_only_while_they_are_used():
    def planned(offload, engine=None):
        chosen = strategy("rlhf_ddp", offload_idle=offload)
        work = replace(WORK, micro_batch_tokens=32)  # small activations, so that weights decide
        return memory(Run([ACTOR, CRITIC, REF], chosen, work, engine, capacity=2**32), 8)

    saved, _, _ = planned(False)
    update, host, peak = planned(True)
    assert peak.endswith(("of the actor", "of the critic"))
    assert update[terms.OPTIMIZER] == saved[terms.OPTIMIZER] == host[terms.OPTIMIZER] == 2 * 8 * P
    assert update[terms.PARAMETERS] == 2 * 4 * P == saved[terms.PARAMETERS] - 4 * P
    assert host[terms.PARAMETERS] == 4 * P
    generation, _, peak = planned(True, Engine(0.9, dtype="bfloat16", sleeps=True))
    assert peak == "generation"
    assert not generation[terms.OPTIMIZER]
    assert generation[terms.PARAMETERS] == 3 * 4 * P  # the reference, in a validation


@pytest.mark.parametrize(("size", "dtype", "each"), [(1, "float32", 4), (1, "bfloat16", 2), (2, "bfloat16", 1)])
def test_each_engine_has_a_copy_of_the_weights_in_host_memory(size, dtype, each):
    engine = Engine(0.4, tensor_parallel_size=size, dtype=dtype)
    _, host, _ = memory(Run([ACTOR, REF], strategy("rlhf_fsdp"), WORK, engine), 8)
    assert host == {terms.PUSHED: each * ACTOR.model.elements}
    _, host, _ = memory(Run([ACTOR, REF], strategy("rlhf_fsdp"), WORK, Engine(0.0)), 8)
    assert host == {}


def test_frozen_head_has_no_gradient():
    trained, adapted = (Role("actor", MODEL, True, lora_rank=rank) for rank in (0, 4))
    difference = 4 * MODEL.hidden * MODEL.vocabulary
    of_trained, of_adapted, of_frozen = (
        moments(Run([role], strategy("rlhf_single"), WORK), 1)[f"the loss of the {role.name}"][terms.LOGITS]
        for role in (trained, adapted, REF)
    )
    assert of_trained - of_adapted == of_trained - of_frozen == difference


@pytest.mark.parametrize(
    ("kind", "expected"), [("AdamW8bit", 2 * (1 + 4 / 256)), ("Lion8bit", 1 + 4 / 256), ("AdamW", 8.0)]
)
def test_states_of_optimizers_of_8_bits(kind, expected, tmp_path):
    optimizer = partial(getattr(torch.optim if kind == "AdamW" else bitsandbytes.optim, kind), lr=1e-3)
    module = GRPOModule(source("qwen2"), optimizer=optimizer)
    (role,) = [role for role in roles_of(module, strategy("rlhf_single"), mixed=False) if role.trained]
    resting = Shard(role, strategy("rlhf_single"), 1, False).resting()
    assert resting[terms.OPTIMIZER] == round(expected * MODEL.elements)


def test_model_of_a_config_alone_is_planned(tmp_path):
    source("qwen2").hf_config().save_pretrained(tmp_path)
    module = GRPOModule(Pretrained(str(tmp_path)))
    (role,) = [role for role in roles_of(module, strategy("rlhf_single"), mixed=False) if role.trained]
    assert role.model.elements == MODEL.elements
    with pytest.raises(FileNotFoundError, match=r"expected a directory with config\.json and safetensors"):
        Pretrained(str(tmp_path)).expect_reachable()


@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_roles_on_one_base_have_the_planned_bytes(quantization, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 3, "vocab_size": 100}
    source("qwen2", **sizes).causal().save_pretrained(tmp_path)
    save_file({"v_head.summary.weight": torch.ones(1, 128)}, tmp_path / "value_head.safetensors")
    base = Pretrained(str(tmp_path), lora=LoRA(4, 8), quantization=quantization)
    module = PPOModule(base, critic=base, reward_model=Pretrained(str(tmp_path), quantization=quantization))
    roles = roles_of(module, strategy("rlhf_single"), mixed=False)
    assert [role.shares_base for role in roles] == [False, True, True]
    planned = sum(Shard(role, strategy("rlhf_single"), 1, False).resting()[terms.PARAMETERS] for role in roles)
    module.configure_model()
    # The scales of int8 are buffers, which are not counted here.
    assert weight_bytes(module) == pytest.approx(planned, rel=0.02 if quantization == "int8" else 0.001)
