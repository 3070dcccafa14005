"""DeepSpeed-specific behaviour: shards, the norm before the step, precisions, offloading, models from a directory.

test_parity.py checks that all strategies give the same weights.
"""

import pytest

from tests.distributed.deepspeed_tasks import MAX_NORM, RATE, model
from tests.distributed.launch import run_ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLOAT32 = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, tied": {"stage": 3, "tied": True},
    "stage 2, offloaded": {"stage": 2, "offload_optimizer": True},
    "stage 3, offloaded": {"stage": 3, "offload_optimizer": True, "offload_params": True},
}
BFLOAT16 = {
    "stage 1": {"stage": 1, "precision": "bf16-mixed"},
    "stage 2": {"stage": 2, "precision": "bf16-mixed"},
    "stage 3": {"stage": 3, "precision": "bf16-mixed"},
    "stage 3, by its source": {"stage": 3, "dtype": "bfloat16"},
}
RUNS = {**{f"float32 {name}": run for name, run in FLOAT32.items()}, **{f"bf16 {n}": r for n, r in BFLOAT16.items()}}
BREAKS = [(stage, precision) for stage in (1, 2, 3) for precision in ("32-true", "bf16-mixed")]
REFERENCES = [
    {"stage": 2, "precision": "32-true"},
    {"stage": 3, "precision": "32-true"},
    {"stage": 2, "precision": "bf16-mixed"},
    {"stage": 3, "precision": "bf16-mixed"},
    {"stage": 3, "precision": "bf16-mixed", "offload_frozen": True},
]
LOADED = ["32-true", "bf16-mixed"]


def requested(runs):
    return {"updates": runs, "breaks": [], "validations": [], "loaded": [], "references": []}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of two ranks."""
    folder = str(tmp_path_factory.mktemp("model"))
    model(tied=True).causal().save_pretrained(folder)
    requests = {
        "updates": RUNS,
        "breaks": BREAKS,
        "validations": [1, 2, 3],
        "loaded": LOADED,
        "references": REFERENCES,
    }
    return run_ranks("tests.distributed.deepspeed_tasks:run_all", 2, requests, folder, seconds=600)


@pytest.fixture(scope="module")
def four():
    """Results of four ranks."""
    return run_ranks("tests.distributed.deepspeed_tasks:run_all", 4, requested(FLOAT32), "", seconds=600)


@pytest.fixture(params=[2, 4])
def on_ranks(request):
    """Results of each rank by run, in float32."""
    answers = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return {name: [rank["updates"][i] for rank in answers] for i, name in enumerate(FLOAT32)}


@pytest.mark.parametrize("name", FLOAT32)
def test_updates_equal_those_of_torch(on_ranks, name):
    # Head and embedding included, which the tied ones share and CausalLM uses beside their own modules; the shares of
    # rows, and so the micro-batches, differ from rank to rank.
    for result in on_ranks[name]:
        assert result["norms"] == pytest.approx(result["plain_norms"], rel=1e-5)
        assert min(result["norms"]) > 2 * MAX_NORM  # or nothing was clipped
        assert result["furthest"][0] == 0  # begins bit-equal, whole weights brought together under the same names
        assert max(result["furthest"]) < 2e-6


@pytest.mark.parametrize("name", FLOAT32)
def test_norm_is_computed_before_any_weight_changes_and_schedulers_set_the_used_rate(on_ranks, name):
    for result in on_ranks[name]:
        assert result["still"]
        assert result["rates"] == pytest.approx([RATE, RATE / 2, RATE / 4])


@pytest.mark.parametrize("name", FLOAT32)
def test_each_rank_holds_only_its_shard(on_ranks, name):
    ranks = len(on_ranks[name])
    for result in on_ranks[name]:
        held = result["held"]
        share = held["all"] / ranks + held["padding"]
        assert share < 0.6 * held["all"]
        if name.startswith("stage 3"):
            assert held["weights"] <= share
        else:
            assert held["weights"] == held["all"]
            assert held["optimized"] <= share


@pytest.mark.parametrize("name", ["stage 3", "stage 3, tied", "stage 3, offloaded"])
def test_iteration_over_unsharded_weights_holds_at_most_the_largest_layer(on_ranks, name):
    for result in on_ranks[name]:
        walk = result["walk"]
        assert walk["before"] == walk["after"] == 0
        assert 0 < walk["most"] <= walk["largest"] < result["held"]["all"] / 2
        assert walk["names"] == (20 if "tied" in name else 21)


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_weights_are_used_for_computation_and_float32_weights_are_updated(two, name):
    for rank in two:
        result = rank["updates"][list(RUNS).index(f"bf16 {name}")]
        assert result["furthest"][0] == 0
        assert result["norms"][0] == pytest.approx(result["plain_norms"][0], rel=1e-3)
        assert result["norms"] == pytest.approx(result["plain_norms"], rel=2e-2)
        assert max(result["furthest"]) <= 2**-7  # weights lie below 2: two units of bfloat16's last place at most
        assert result["still"]


@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[f"stage {stage}, {p}" for stage, p in BREAKS])
def test_nan_gradient_on_one_rank_skips_the_update_on_all(two, number):
    for rank in two:
        result = rank["breaks"][number]
        assert "the actor's gradient norm is inf at step 0; its weights were not changed" in result["error_text"]
        assert not result["moved"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_validation_works_without_a_fit_and_after_one(two, stage):
    for rank in two:
        result = rank["validations"][stage - 1]
        assert [result["alone"], result["after"]] == pytest.approx(result["expected"], rel=1e-5)
        assert abs(result["expected"][0] - result["expected"][1]) > 1e-2


@pytest.mark.parametrize("number", range(len(LOADED)), ids=LOADED)
def test_model_from_a_directory_is_sharded_unchanged_and_a_new_head_is_zero(two, number):
    for rank in two:
        result = rank["loaded"][number]
        assert result["spread"]
        assert result["furthest"] == 0
        assert result["buffers"]  # rotary frequencies rounded to bfloat16 would be far off at long distances
        assert result["head"] == [[0.0] * 31]


@pytest.mark.parametrize("number", range(len(REFERENCES)), ids=[str(run) for run in REFERENCES])
def test_frozen_role_computes_like_the_trained_one_and_is_not_changed(two, number):
    run = REFERENCES[number]
    for rank in two:
        result = rank["references"][number]
        assert result["kl"] == 0
        assert not result["moved"]
        assert result["dtypes"] == ["torch.float32" if run["precision"] == "32-true" else "torch.bfloat16"]
        assert result["held"] == result["whole"] if run["stage"] < 3 else result["held"] < 0.51 * result["whole"]


def test_shared_memory_is_freed_with_the_processes(two):
    # 66 MiB of each process stay in /dev/shm for ever otherwise.
    for rank in two:
        assert len(rank["shared_memory"]) == 2  # one each, opened by both
        assert all(line.endswith("(deleted)") for line in rank["shared_memory"])


def test_deepspeed_adam_for_cpus_gives_the_updates_of_torch():
    # It is compiled when it is first used.
    for rank in run_ranks("tests.distributed.deepspeed_tasks:by_deepspeeds_adam", 2, [2, 3], seconds=850):
        for result in rank:
            assert result["moved"] > 1e-2
            assert result["furthest"] < 1e-6
