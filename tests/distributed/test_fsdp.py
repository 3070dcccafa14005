"""FSDP2: sharded parameters, models built on one rank, and the results of one process for every option."""

import math

import pytest
import torch

from lightning_rlhf import SFTModule
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy
from lightning_rlhf.strategies.tensor_parallel import tensor_parallel_plan
from tests.distributed.fsdp_ranks import ARCHITECTURES
from tests.distributed.launch import run_ranks
from tests.distributed.tasks import largest_differences
from tests.stand_ins import TINY_LLAMA, TinyModel, quiet_trainer

MiB = 2**20
PPO = {"actor", "critic", "ref", "reward_model"}
TWO = {
    "plain": {"options": {}},
    "untied": {"options": {}, "tied": False},
    "checkpointed": {"options": {"activation_checkpointing": True}},
    "offloaded": {"options": {"cpu_offload": True}},
    "resharded": {"options": {"reshard_after_forward": True}},
    "kept whole": {"options": {"reshard_after_forward": False}},
    "reduced once": {"options": {"reduce_every_micro_batch": False}},
    "trained again": {"options": {}, "kind": "sft", "again": True},
    "bf16": {"options": {}, "precision": "bf16-mixed", "kind": "sft"},
    "bf16 ppo": {"options": {}, "precision": "bf16-mixed"},
}
SPLIT = {"tensor_parallel_size": 2}
EVERYTHING = SPLIT | {"cpu_offload": True, "activation_checkpointing": True, "reduce_every_micro_batch": False}
FOUR = {
    "on four": {"options": {}},
    "split": {"options": SPLIT},
    "split, with everything": {"options": EVERYTHING, "tied": False},
    "split qwen2": {"options": SPLIT, "architecture": "qwen2", "kind": "sft"},
    "split qwen3": {"options": SPLIT, "architecture": "qwen3", "kind": "sft"},
}
FLOAT32 = [name for name in (*TWO, *FOUR) if not name.startswith("bf16")]


def alone(run):
    """Return the run without strategy options, for a single process."""
    return {key: value for key, value in run.items() if key != "options"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of every rank and the file of weights, for each run and the same run in one process."""
    folder = tmp_path_factory.mktemp("weights")
    result = {}
    references = {repr(alone(run)): alone(run) for run in (*TWO.values(), *FOUR.values())}
    for ranks, runs in ((1, references), (2, TWO), (4, FOUR)):
        described = [run | {"weights": str(folder / f"{ranks}-{i}")} for i, run in enumerate(runs.values())]
        output = run_ranks("tests.distributed.fsdp_ranks:train", ranks, described, seconds=600)
        for i, name in enumerate(runs):
            result[name] = {"ranks": [of_rank[i] for of_rank in output], "weights": described[i]["weights"]}
    for name, run in (TWO | FOUR).items():
        result[name]["alone"] = result[repr(alone(run))]
    return result


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Results of two ranks that build models."""
    folder = tmp_path_factory.mktemp("model")
    TinyModel(seed=5).causal().save_pretrained(folder)
    return run_ranks("tests.distributed.fsdp_ranks:build", 2, str(folder))


# -- the numbers of one process ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOAT32)
def test_three_updates_give_the_weights_and_gradient_norms_of_one_process(trained, name):
    (reference,), ranks = trained[name]["alone"]["ranks"], trained[name]["ranks"]
    assert len(reference["norms"]) == (6 if name == "trained again" else 3)
    assert len(reference["validations"]) > 0
    for output in ranks:
        assert output["names"] == reference["names"]
        for kind in ("norms", "validations"):
            for step, expected in zip(output[kind], reference[kind], strict=True):
                assert step == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert min(min(step.values()) for step in reference["norms"]) > 0.5  # so that clipping has something to do
    differences = largest_differences(trained[name]["alone"]["weights"], trained[name]["weights"])
    assert max(differences.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointed", "offloaded", "resharded", "kept whole"])
def test_sharding_and_recomputation_options_change_no_bit(trained, name):
    assert set(largest_differences(trained["plain"]["weights"], trained[name]["weights"]).values()) == {0.0}


@pytest.mark.slow
def test_every_rank_receives_the_same_unsharded_weights(trained):
    for name in (*TWO, *FOUR):
        assert len({output["sum"] for output in trained[name]["ranks"]}) == 1


@pytest.mark.slow
def test_bf16_mixed_computes_blocks_in_bfloat16_and_stores_weights_in_float32(trained):
    # Of PPO no numbers: whether a ratio is clipped turns on the last bit of a log-probability.
    (reference,) = trained["bf16"]["alone"]["ranks"]
    for output in trained["bf16"]["ranks"]:
        for step, expected in zip(output["norms"], reference["norms"], strict=True):
            assert step == pytest.approx(expected, rel=2e-2)
    for output in (*trained["bf16"]["ranks"], *trained["bf16 ppo"]["ranks"]):
        assert output["types"] == ["torch.bfloat16"]
        assert output["stored in"] == ["torch.float32"]
    assert trained["plain"]["ranks"][0]["types"] == ["torch.float32"]


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TWO, "on four"])
def test_every_rank_holds_a_shard_of_each_weight_of_every_role_after_every_step(trained, name):
    ranks = trained[name]["ranks"]
    for rank, output in enumerate(ranks):
        assert len(output["local sizes"]) == (6 if name == "trained again" else 3)
        for roles in output["local sizes"]:
            assert roles.keys() == ({"actor"} if TWO.get(name, {}).get("kind") == "sft" else PPO)
            for weights in roles.values():
                for shape, here in weights.values():
                    assert here == len(rows_of(rank, shape[0], len(ranks))) * math.prod(shape[1:])


def rows_of(rank, rows, ranks):
    """Return the row indices of a rank, divided as by ``torch.chunk``."""
    most = -(-rows // ranks)
    return range(rows)[rank * most : (rank + 1) * most]


@pytest.mark.slow
def test_tensor_parallel_layers_are_quartered_and_their_ranks_share_rows(trained):
    for name in FOUR:
        if name == "on four":
            continue
        ranks = trained[name]["ranks"]
        assert [output["data"] for output in ranks] == [[0, 2], [0, 2], [1, 2], [1, 2]]
        for text in ranks:
            for roles in text["local sizes"]:
                for weights in roles.values():
                    quarters = {key: value for key, value in weights.items() if "_proj." in key}
                    assert len(quarters) >= 14
                    for key, (shape, here) in quarters.items():
                        whole_row = key.endswith(("o_proj.bias", "down_proj.bias"))
                        assert here * (2 if whole_row else 4) == math.prod(shape)


@pytest.mark.slow
def test_gradients_are_reduced_once_per_update_by_default(trained):
    for name in ("plain", "split", "reduced once"):
        for output in trained[name]["ranks"]:
            syncs = [sync for _, sync, _, _ in output["backwards"]]
            assert 0 < sum(syncs) < len(syncs)
            for _, sync, any_there, all_there in output["backwards"]:
                assert any_there == all_there == (sync or name != "reduced once")


@pytest.mark.slow
def test_tied_weights_stay_tied(trained):
    for name, run in (TWO | FOUR).items():
        assert {output["tied"] for output in trained[name]["ranks"]} == {run.get("tied", True)}


# -- building ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_loaded_on_rank_0_only(built):
    assert [output["devices"] for output in built] == [["meta", "cpu"], ["meta"]]


@pytest.mark.slow
def test_weights_names_and_buffers_are_bitwise_those_of_a_model_built_in_one_process(built):
    for output in built:
        assert len(output["same"]) == 10
        assert all(output["same"].values()), output["same"]


@pytest.mark.slow
def test_matrices_are_cast_to_the_engine_dtype_before_gathering_unless_adapters_are_merged(built):
    for output in built:
        full, lora = output["cast"]["full"], output["cast"]["lora"]
        assert full["same"]
        assert lora["same"]
        assert full["gathered"] == ["torch.bfloat16", "torch.float32"]  # vectors are float32
        assert full["matrices"] == full["all"] > 0
        assert lora["gathered"] == ["torch.float32"]


@pytest.mark.slow
def test_building_needs_the_memory_of_the_model_on_rank_0_and_of_shards_and_a_layer_elsewhere(built):
    first, second = built
    assert first["built"] < first["model"] + first["layer"] + 4 * MiB
    assert second["built"] < second["model"] / 2 + second["layer"] + 8 * MiB < second["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dimensions"),
    [
        ({"shard_size": 2}, ["replicate", "shard"]),
        ({"tensor_parallel_size": 2}, ["data_parallel", "tensor_parallel"]),
        ({"sequence_parallel_size": 2, "shard_size": 1}, ["replicate", "sequence_parallel"]),
    ],
    ids=str,
)
def test_all_groups_have_the_timeout_of_the_strategy(options, dimensions):
    for output in run_ranks("tests.distributed.fsdp_ranks:timeouts", 4, options):
        assert {f"mesh_{name}" for name in dimensions} <= set(output)
        assert set(output.values()) == {420.0}


@pytest.mark.slow
@pytest.mark.parametrize("receivers", [[0], [3], [0, 2]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_size": 2},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        {"sequence_parallel_size": 2},
        {"tensor_parallel_size": 2, "shard_size": 1},
    ],
    ids=str,
)
def test_weights_reach_the_ranks_that_need_them(options, receivers):
    assert run_ranks("tests.distributed.fsdp_ranks:gather_on", 4, options, receivers) == [[]] * 4


@pytest.mark.slow
def test_gathering_weights_needs_the_memory_of_one_layer(built):
    for output in built:
        assert output["gathered"] < output["layer"] + 4 * MiB < output["model"] / 4


@pytest.mark.slow
def test_a_push_of_a_gigabyte_needs_one_copy_beside_the_shards():
    first, second = run_ranks("tests.distributed.fsdp_ranks:push_a_gigabyte", 2)
    largest = 3 * 2048 * 5632 * 4  # of a matrix that is copied, the next one, and its gathered parts
    assert first["bytes"] > 10**9
    assert first["second memory"] < first["bytes"] + largest + 16 * MiB  # the shared memory, which is mapped now
    assert max(second["first memory"], second["second memory"]) < 16 * MiB  # it only sends its shards


@pytest.mark.slow
def test_different_tensors_on_rank_0_raise_on_every_rank(built):
    for output in built:
        assert "must have the same tensors" in output["error"]
        assert "lm.lm_head.weight" in output["error"]


# -- refusals ---------------------------------------------------------------------------------------------------------


def bare(**architecture):
    with torch.device("meta"):
        return FromConfig(TINY_LLAMA | architecture).causal().lm


@pytest.mark.parametrize(
    ("size", "architecture", "message"),
    [
        (2, {}, "tensor_parallel_size: 2 does not divide the actor's num_attention_heads, which is 1"),
        (4, ARCHITECTURES["llama"], "4 does not divide the actor's num_key_value_heads, which is 2"),
        (
            2,
            ARCHITECTURES["llama"] | {"intermediate_size": 47},
            "2 does not divide the actor's intermediate_size, which is 47",
        ),
        (2, {"model_type": "gpt2"}, "the actor's GPT2LMHeadModel: transformers has no plan"),
        (2, {"model_type": "olmo2"}, "Olmo2ForCausalLM: its plan uses colwise_gather_output, rowwise_split_input"),
    ],
)
def test_model_that_does_not_support_tensor_parallelism_is_rejected(size, architecture, message):
    with pytest.raises(ValueError, match=message):
        tensor_parallel_plan("actor", bare(**architecture), size)


def test_non_linear_layer_is_not_split():
    class Other(torch.nn.Linear):
        pass

    model = bare(**ARCHITECTURES["llama"])
    model.model.layers[1].mlp.up_proj = Other(32, 48)
    with pytest.raises(ValueError, match=r"supports only torch\.nn\.Linear layers, but the actor has Other:"):
        tensor_parallel_plan("actor", model, 2)


def test_models_without_tensor_parallelism_are_not_checked():
    assert tensor_parallel_plan("actor", bare(model_type="gpt2"), 1) == {}


def test_tensor_parallel_size_that_does_not_divide_the_processes_is_rejected():
    trainer = quiet_trainer(strategy=RLHFFSDPStrategy(tensor_parallel_size=2), devices=1)
    with pytest.raises(ValueError, match="tensor_parallel_size: 2 does not divide the 1 processes of this run"):
        trainer.fit(SFTModule(TinyModel()), [])
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        RLHFFSDPStrategy(tensor_parallel_size=0)
