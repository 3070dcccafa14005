"""Four roles on one base, plain or quantized: every strategy trains like one process, and like separate copies."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_rlhf import FromConfig
from lightning_rlhf.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from tests.distributed.launch import run_ranks
from tests.distributed.tasks import largest_differences
from tests.distributed.test_lora_parity import keys_of
from tests.distributed.test_parity import NORMS, WEIGHTS, assert_equal_metrics, norm_difference
from tests.stand_ins import TINY_LLAMA


def described(base, apart, name, folder, **options):
    """Return a run of PPO whose roles have the same source, or copies of it."""
    checkpoint = {str(seed): str(path) for seed, path in zip((0, 1, 3), apart, strict=True)} if apart else base
    module = {"lora": True, "checkpoint": checkpoint, "heads": 2}
    weights = f"{folder}/{'apart' if apart else 'shared'}.safetensors"
    return {"kind": "ppo", "strategy": name, "module": module, "weights": weights} | options


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Three equal directories of a language model that has a head for one number too."""
    folder = tmp_path_factory.mktemp("copies")
    architecture = TINY_LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 2}
    FromConfig(architecture, seed=0).causal().save_pretrained(folder / "0")
    weights = load_file(folder / "0" / "model.safetensors")
    head = torch.linspace(-0.3, 0.3, TINY_LLAMA["hidden_size"])[None]
    save_file(weights | {"score.weight": head}, folder / "0" / "model.safetensors", {"format": "pt"})
    for number in (1, 3):
        shutil.copytree(folder / "0", folder / str(number))
    return [folder / str(number) for number in (0, 1, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("rlhf_single", 1),
        pytest.param("rlhf_ddp", 2, marks=pytest.mark.slow),
        pytest.param("rlhf_fsdp", 2, marks=pytest.mark.slow),
        pytest.param("rlhf_deepspeed_stage_1", 2, marks=pytest.mark.slow),
        pytest.param("rlhf_deepspeed_stage_2", 2, marks=pytest.mark.slow),
        pytest.param("rlhf_deepspeed_stage_3", 2, marks=pytest.mark.slow),
    ],
)
def test_three_steps_equal_those_of_separate_copies(copies, tmp_path, strategy, ranks):
    runs = [described(str(copies[0]), apart, strategy, tmp_path) for apart in (None, copies)]
    for shared, apart in run_ranks("tests.distributed.tasks:train", ranks, runs):
        assert shared["frozen"]
        assert shared["steps"] == apart["steps"]
        assert shared["bytes"] < 0.55 * apart["bytes"], (shared["bytes"], apart["bytes"])
    assert max(largest_differences(tmp_path / "shared.safetensors", tmp_path / "apart.safetensors").values()) == 0


# -- quantized --------------------------------------------------------------------------------------------------------


def quantized(base, name, folder, kind="nf4", **options):
    module = {"lora": True, "checkpoint": str(base), "quantization": kind, "heads": 2}
    weights = f"{folder}/{name}-{kind}.safetensors"
    return {"kind": "ppo", "strategy": name, "module": module, "weights": weights} | options


@pytest.fixture(scope="module")
def alone(copies, tmp_path_factory):
    """Results of one process, and their directory."""
    folder = tmp_path_factory.mktemp("alone")
    runs = [quantized(copies[0], "rlhf_single", folder, kind) for kind in ("nf4", "int8")]
    return run_ranks("tests.distributed.tasks:train", 1, runs)[0], folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rlhf_ddp", "rlhf_deepspeed_stage_1", "rlhf_deepspeed_stage_2"])
def test_quantized_roles_on_two_ranks_train_like_one_process(copies, alone, tmp_path, strategy):
    expected, folder = alone
    runs = [quantized(copies[0], strategy, tmp_path, kind) for kind in ("nf4", "int8")]
    for answers in run_ranks("tests.distributed.tasks:train", 2, runs):
        for ours, theirs in zip(answers, expected, strict=True):
            assert ours["frozen"]
            assert norm_difference(ours, theirs) <= NORMS
            assert_equal_metrics(ours, theirs)
    for kind in ("nf4", "int8"):
        differences = largest_differences(
            tmp_path / f"{strategy}-{kind}.safetensors", folder / f"rlhf_single-{kind}.safetensors"
        )
        assert max(differences.values()) <= WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_run_resumes_to_the_bit(copies, tmp_path, kind):
    whole = quantized(copies[0], "rlhf_single", tmp_path, kind, save=f"{tmp_path}/2.ckpt", save_at=2)
    resumed = quantized(copies[0], "rlhf_single", tmp_path, kind, ckpt=f"{tmp_path}/2.ckpt")
    resumed["weights"] = f"{tmp_path}/resumed.safetensors"
    straight, again = run_ranks("tests.distributed.tasks:train", 1, [whole, resumed])[0]
    assert again["steps"] == straight["steps"][2:]
    assert set(largest_differences(whole["weights"], resumed["weights"]).values()) == {0.0}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strategy", ["rlhf_fsdp", "rlhf_deepspeed_stage_3"])
def test_strategies_that_shard_weights_reject_quantized_ones(copies, tmp_path, strategy):
    with pytest.raises(RuntimeError, match=r"shards weights, but it cannot shard weights in nf4, as the actor"):
        run_ranks("tests.distributed.tasks:train", 1, [quantized(copies[0], strategy, tmp_path)])


# -- optimizers in 8 bits ---------------------------------------------------------------------------------------------


def in_eight_bits(name, folder, **options):
    weights = f"{folder}/{name}.safetensors"
    return {"kind": "ppo", "strategy": name, "module": {"eight_bits": True}, "weights": weights} | options


@pytest.mark.slow
def test_run_with_optimizers_in_8_bits_resumes_to_the_bit(tmp_path):
    whole = in_eight_bits("rlhf_single", tmp_path, save=f"{tmp_path}/2.ckpt", save_at=2)
    resumed = in_eight_bits(
        "rlhf_single", tmp_path, ckpt=f"{tmp_path}/2.ckpt", weights=f"{tmp_path}/resumed.safetensors"
    )
    straight, again = run_ranks("tests.distributed.tasks:train", 1, [whole, resumed])[0]
    assert again["steps"] == straight["steps"][2:]
    assert set(largest_differences(whole["weights"], resumed["weights"]).values()) == {0.0}
    stored = {key for file in tmp_path.glob("2.ckpt/v*/actor/*.safetensors") for key in keys_of(file)}
    assert {key.rpartition(".")[2] for key in stored} >= {"state1", "state2", "absmax1", "qmap1", "step"}


@pytest.mark.slow
def test_optimizers_in_8_bits_resume_on_two_ranks_but_not_in_shards(tmp_path):
    first = in_eight_bits("rlhf_single", tmp_path, save=f"{tmp_path}/2.ckpt", save_at=2)
    run_ranks("tests.distributed.tasks:train", 1, [first])
    later = in_eight_bits("rlhf_ddp", tmp_path, ckpt=f"{tmp_path}/2.ckpt")
    run_ranks("tests.distributed.tasks:train", 2, [later])
    assert max(largest_differences(first["weights"], later["weights"]).values()) <= 2e-3  # a step of Adam is 1e-3
    for name in ("rlhf_fsdp", "rlhf_deepspeed_stage_2"):
        with pytest.raises(
            RuntimeError, match=r"AdamW8bit keeps a tensor of shape .* as 'qmap1' .*: use rlhf_single or rlhf_ddp"
        ):
            run_ranks("tests.distributed.tasks:train", 1, [in_eight_bits(name, tmp_path)])


# -- feed-forward layers in pieces ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp:RLHFDDPStrategy", {}),
        ("fsdp:RLHFFSDPStrategy", {}),
        ("deepspeed.strategy:RLHFDeepSpeedStrategy", {"stage": 2}),
    ],
)
def test_feed_forward_layers_in_pieces_train_like_whole_ones(tmp_path, strategy, options):
    def run(ranks, made):
        described = {
            "kind": "ppo",
            "strategy": made,
            "module": {},
            "weights": f"{tmp_path}/{ranks}.safetensors",
        }
        return run_ranks("tests.distributed.tasks:train", ranks, [described])

    ((expected,),) = run(1, "rlhf_single")
    options = {"mlp_tokens": 5, "activation_checkpointing": True, **options}
    for (ours,) in run(2, [f"lightning_rlhf.strategies.{strategy}", options]):
        assert norm_difference(ours, expected) <= NORMS
        assert_equal_metrics(ours, expected)
    assert max(largest_differences(tmp_path / "1.safetensors", tmp_path / "2.safetensors").values()) <= WEIGHTS


def test_stage_3_rejects_pieces():
    with pytest.raises(
        ValueError, match=r"^mlp_tokens: stage 3 gathers weights for each piece of a row, and ranks have"
    ):
        RLHFDeepSpeedStrategy(stage=3, mlp_tokens=8)
