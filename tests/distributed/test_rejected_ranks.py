"""An update is skipped only if its tokens are rejected on all ranks, under every strategy."""

import pytest

from tests.distributed.launch import run_ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STAGE = "lightning_rlhf.strategies.deepspeed.strategy:RLHFDeepSpeedStrategy"
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STRATEGIES = {
    "ddp": {"strategy": "rlhf_ddp"},
    "ddp, offloaded": {"strategy": ["lightning_rlhf.strategies.ddp:RLHFDDPStrategy", {"offload_idle": True}]},
    "fsdp": {"strategy": "rlhf_fsdp"},
    "fsdp, reduced once": {
        "strategy": ["lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy", {"reduce_every_micro_batch": False}]
    },
    "fsdp, offloaded": {"strategy": ["lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy", {"cpu_offload": True}]},
    "stage 1": {"strategy": [STAGE, {"stage": 1}]},
    "stage 2": {"strategy": [STAGE, {"stage": 2}]},
    "stage 3": {"strategy": [STAGE, {"stage": 3, "config": SHARDED}]},
    "stage 2, offloaded": {"strategy": [STAGE, {"stage": 2, "offload_optimizer": True}]},
    "stage 3, offloaded": {
        "strategy": [STAGE, {"stage": 3, "offload_optimizer": True, "offload_params": True, "config": SHARDED}]
    },
    "stage 1, bf16": {"strategy": [STAGE, {"stage": 1}], "precision": "bf16-mixed"},
    "stage 2, bf16": {"strategy": [STAGE, {"stage": 2}], "precision": "bf16-mixed"},
    "stage 3, bf16": {"strategy": [STAGE, {"stage": 3, "config": SHARDED}], "precision": "bf16-mixed"},
}
# Batches of the steps; the second of a pair leaves out the same updates before any forward pass.
PAIRS = [
    (["accepted", "all", "accepted"], ["accepted", "none", "accepted"]),
    # The optimizer has no state before the first step; updates of one micro-batch are between updates of several.
    (["few all", "accepted", "few all", "accepted"], ["few none", "accepted", "few none", "accepted"]),
]
RUNS = [*({"batches": batches} for pair in PAIRS for batches in pair), {"batches": ["accepted", "one"]}]
RUNS.append({"batches": ["accepted", "all"], "critic": True})


@pytest.fixture(scope="module")
def trained():
    """Results of both ranks for all runs, by strategy."""
    described = [strategy | run for strategy in STRATEGIES.values() for run in RUNS]
    result = list(zip(*run_ranks("tests.distributed.rejected_ranks:steps", 2, described, seconds=850), strict=True))
    return {name: result[i * len(RUNS) : (i + 1) * len(RUNS)] for i, name in enumerate(STRATEGIES)}


@pytest.fixture(params=STRATEGIES)
def answers(request, trained):
    return trained[request.param]


def test_update_rejected_by_all_ranks_is_skipped_like_one_without_tokens(answers):
    for number, (batches, _) in enumerate(PAIRS):
        for rejected, without in zip(answers[2 * number], answers[2 * number + 1], strict=True):
            for kind, ours, theirs in zip(batches, rejected["steps"], without["steps"], strict=True):
                assert ours["changed"] == (["actor"] if kind == "accepted" else [])
                assert ours["updates"] == theirs["updates"] == (2 if kind == "accepted" else 0)
                assert ours["has_norm"] == theirs["has_norm"] == (kind == "accepted")
                assert ours["rejected"] == 1 or kind == "accepted"
                assert ours["sums"] == theirs["sums"]
            assert rejected["state"] == without["state"]  # weights and moments as in a checkpoint
            assert any("exp_avg" in name for name in rejected["state"])


def test_update_rejected_by_one_rank_is_executed(answers):
    for rank in answers[4]:
        assert rank["steps"][1]["changed"] == ["actor"]
        assert rank["steps"][1]["updates"] == 1
        assert rank["steps"][1]["has_norm"]
        assert 0 < rank["steps"][1]["rejected"] < 1


def test_critic_is_updated_if_the_actor_is_not(answers):
    for rank in answers[5]:
        assert rank["steps"][1]["changed"] == ["critic"]
        assert rank["steps"][1]["updates"] == 0
