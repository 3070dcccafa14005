"""oneDNN's matrix products under every strategy: the training of one process with torch's products."""

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.tasks import largest_differences
from tests.distributed.test_parity import (
    DEEPSPEED,
    KINDS,
    NORMS,
    STRATEGIES,
    THRESHOLD,
    WEIGHTS,
    assert_equal_metrics,
    norm_difference,
)

VOCABULARY, WIDTH, INNER = 96, 64, 128  # as wide as oneDNN is used for
WIDE = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY, "initializer_range": 0.1}
ATTENTION, DOWN, HEAD = (WIDTH, WIDTH), (WIDTH, INNER), (VOCABULARY, WIDTH)
CHECKPOINTED_FSDP = ["lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy", {"activation_checkpointing": True}]
WHOLE_STAGE_3 = [DEEPSPEED, {"stage": 3, "config": THRESHOLD}]  # without activation checkpointing
RUNS = {
    "rlhf_ddp": "rlhf_ddp",
    "rlhf_fsdp": "rlhf_fsdp",
    "rlhf_fsdp, activation checkpointing": CHECKPOINTED_FSDP,
    "rlhf_deepspeed_stage_1": "rlhf_deepspeed_stage_1",
    "rlhf_deepspeed_stage_2": "rlhf_deepspeed_stage_2",
    "rlhf_deepspeed_stage_3": WHOLE_STAGE_3,
    "rlhf_deepspeed_stage_3, activation checkpointing": STRATEGIES["rlhf_deepspeed_stage_3"],
}


def described(kind, strategy, folder, lora):
    """Return a run with matrices that oneDNN multiplies."""
    return {
        "kind": kind,
        "strategy": strategy,
        "weights": f"{folder}/{kind}.safetensors",
        "module": {"heads": 2, "architecture": WIDE, "lora": lora},
    }


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "LoRA"])
def alone(request, tmp_path_factory):
    """Results of one process in plain Lightning on a CPU without AVX-512."""
    folder = tmp_path_factory.mktemp("alone")
    runs = [described(kind, "auto", folder, request.param) for kind in KINDS]
    (answers,) = run_ranks("tests.distributed.products_ranks:by_torch", 1, runs)
    return dict(zip(KINDS, answers, strict=True)), folder, request.param


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_three_updates_equal_those_of_one_process_with_the_products_of_torch(name, alone, tmp_path):
    expected, folder, lora = alone
    runs = [described(kind, RUNS[name], tmp_path, lora) for kind in KINDS]
    for answers in run_ranks("tests.distributed.products_ranks:train", 2, runs):
        for kind, answer in zip(KINDS, answers, strict=True):
            shapes = {tuple(shape) for shape in answer["shapes"]}
            assert shapes >= {ATTENTION, DOWN, DOWN[::-1]} | ({HEAD} if kind != "rm" else set())
            assert answer["frozen"]
            assert norm_difference(answer, expected[kind]) <= NORMS
            assert_equal_metrics(answer, expected[kind])
    for kind in KINDS:
        file = f"{kind}.safetensors"
        assert max(largest_differences(tmp_path / file, folder / file).values()) <= WEIGHTS
