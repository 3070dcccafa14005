"""DeepSpeed's state is read and written in the common format; its private methods still exist."""

import os

import pytest

from tests.distributed.launch import run_ranks
from tests.strategies import role_ranks
from tests.strategies.role_ranks import ZERO, alone, back_alone, batches, largest_error, loss_of, trained_alone

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")


@pytest.fixture(scope="module", params=[2, 3])
def ways(request, tmp_path_factory):
    """Folder and results of the ranks for each variant of ZeRO."""
    folder = tmp_path_factory.mktemp(f"zero on {request.param}")
    for optimizer in ("adamw", "sgd", "momentum"):
        trained_alone(optimizer, folder / optimizer)
    environment = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(request.param)}
    function = "tests.strategies.role_ranks:zero_ranks"
    answers = run_ranks(function, request.param, str(folder), list(ZERO), environment=environment, seconds=900)
    return folder, answers[0]


def alone_before(optimizer, folder):
    role = role_ranks.OddRole(seed=1)
    made = role_ranks.OPTIMIZERS[optimizer](role)
    version = role_ranks.manifest.verified(folder / optimizer / "before")
    role_ranks.native_load(role, made, version / "actor")
    return float(loss_of(role, batches(1)[0]).detach())


@pytest.mark.slow
def test_every_variant_of_zero_reads_writes_computes_and_resumes(ways):
    folder, answers = ways
    for name, (optimizer, _, bf16) in ZERO.items():
        again, loss = answers[name]
        # DeepSpeed's own Adam has other settings, and otherwise all that AdamW has
        same, optimizer = ("settings" if optimizer == "cpu_adam" else None), alone(optimizer)
        assert again == same, f"{name}: {again} differs after reading and writing"
        # forward uses the weights that were read, rounded if the role computes in bfloat16
        assert loss == pytest.approx(alone_before(optimizer, folder), abs=2e-2 if bf16 else 1e-6), name
        # and the next step is the one that a single process makes
        error = largest_error(folder / f"{name} on", folder / optimizer / "after")
        assert error < (2e-2 if bf16 else 1e-6), (name, error)
        assert back_alone(optimizer, folder / f"{name} on") == same, name
    again, loss = answers["weights only"]
    assert again is None
    assert loss == pytest.approx(alone_before("adamw", folder), abs=1e-6)


# Name, where it is, and what here depends on it.
PRIVATE = [
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition", "writing moments, stage 3"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3._partition_all_parameters", "weights read, stage 3"),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters",
        "weights read, stage 3",
    ),
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state", "moments read"),
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.update_lp_params", "weights read"),
    ("runtime.bf16_optimizer", "BF16_Optimizer._lazy_init_hp_params_optimizer_state", "moments read, bf16 and stage 1"),
    ("runtime.bf16_optimizer", "BF16_Optimizer.update_lp_params", "weights read, bf16 and stage 1"),
]


@pytest.mark.parametrize(("module", "name", "used_for"), PRIVATE)
def test_private_method_exists(module, name, used_for):
    import importlib

    owner, _, method = name.partition(".")
    result = getattr(importlib.import_module(f"deepspeed.{module}"), owner, None)
    assert hasattr(result, method), f"deepspeed.{module}.{name} is gone: strategies/zero_state.py needs it, {used_for}"
