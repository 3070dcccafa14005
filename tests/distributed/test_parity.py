"""Every strategy trains like one process: three updates on the same batches give equal weights up to rounding.

Batches of seven rows, validation batches of five and responses of different lengths give ranks different numbers of
rows, tokens and micro-batches; the results are equal because denominators are computed over all ranks.

    python -m tests.distributed.test_parity      measures and prints the table of docs/tested.md
"""

import math
import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests import figures
from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.tasks import largest_differences

KINDS = ("sft", "rm", "ppo")
DEEPSPEED = "lightning_rlhf.strategies.deepspeed.strategy:RLHFDeepSpeedStrategy"
# Tiny models would stay whole under ZeRO-3: it shards no parameter below a threshold.
THRESHOLD = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
SHARDED = {"stage": 3, "activation_checkpointing": True, "config": THRESHOLD}
STRATEGIES = {
    "rlhf_ddp": "rlhf_ddp",
    "rlhf_fsdp": "rlhf_fsdp",
    "rlhf_fsdp, tensor parallel 2": ["lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy", {"tensor_parallel_size": 2}],
    "rlhf_fsdp, sequence parallel 2": [
        "lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy",
        {"sequence_parallel_size": 2},
    ],
    "rlhf_fsdp, sequence parallel 4": [
        "lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy",
        {"sequence_parallel_size": 4},
    ],
    "rlhf_fsdp, sequence parallel 2, tensor parallel 2": [
        "lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy",
        {"sequence_parallel_size": 2, "tensor_parallel_size": 2},
    ],
    "rlhf_fsdp, replicas, sequence parallel 2": [
        "lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy",
        {"shard_size": 1, "sequence_parallel_size": 2},
    ],
    "rlhf_fsdp, replicas": ["lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy", {"shard_size": 2}],
    "rlhf_fsdp, replicas, tensor parallel 2": [
        "lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy",
        {"shard_size": 2, "tensor_parallel_size": 2},
    ],
    "rlhf_deepspeed_stage_1": "rlhf_deepspeed_stage_1",
    "rlhf_deepspeed_stage_2": "rlhf_deepspeed_stage_2",
    "rlhf_deepspeed_stage_3": [DEEPSPEED, SHARDED],
}
STRATEGY_RUNS = [
    ("rlhf_ddp", 2),
    ("rlhf_fsdp", 2),
    ("rlhf_deepspeed_stage_3", 2),
    ("rlhf_ddp", 3),
    ("rlhf_fsdp", 4),
    ("rlhf_fsdp, tensor parallel 2", 4),
    ("rlhf_fsdp, sequence parallel 2", 2),
    ("rlhf_fsdp, sequence parallel 2", 4),
    ("rlhf_fsdp, sequence parallel 4", 4),
    ("rlhf_fsdp, sequence parallel 2, tensor parallel 2", 4),
    ("rlhf_fsdp, replicas, sequence parallel 2", 4),
    ("rlhf_fsdp, replicas", 4),
    ("rlhf_fsdp, replicas, tensor parallel 2", 8),
    ("rlhf_deepspeed_stage_1", 2),
    ("rlhf_deepspeed_stage_2", 2),
    ("rlhf_deepspeed_stage_3", 4),
]
QUICK = {("rlhf_fsdp", 2), ("rlhf_deepspeed_stage_3", 2)}
WEIGHTS, NORMS, METRICS = 1e-5, 1e-5, 1e-4  # absolute; relative; relative, or absolute where they are small


def trained(strategy, ranks, folder):
    """Return the results of each kind of run, and the file with its weights."""
    inputs = {
        "strategy": strategy,
        "module": {"heads": 4},
    }  # as many as the largest group of processes that divides them
    runs = [{"kind": kind, "weights": f"{folder}/{kind}.safetensors", **inputs} for kind in KINDS]
    answers = run_ranks("tests.distributed.tasks:train", ranks, runs)
    return {kind: [answer[i] for answer in answers] for i, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Results of one process in plain Lightning."""
    folder = tmp_path_factory.mktemp("alone")
    return trained("auto", 1, folder), folder


def norm_difference(ours, theirs):
    """Return the largest relative difference of any gradient norm in any step."""
    pairs = zip(ours["steps"], theirs["steps"], strict=True)
    return max(abs(a[name] / b[name] - 1) for a, b in pairs for name in b if name.startswith("grad_norm/"))


def assert_equal_metrics(ours, theirs, ties=False):
    """Compare all metrics; with ``ties``, rounding may order pairs that are equal before the first update."""
    for of in ("steps", "validations"):
        assert len(ours[of]) == len(theirs[of]) > 0
        for a, b in zip(ours[of], theirs[of], strict=True):
            assert a.keys() == b.keys()
            for name, value in b.items():
                if ties and name == "train/pair_accuracy" and b["train/score_margin"] == 0.0:
                    continue
                close = math.isclose(a[name], value, rel_tol=METRICS, abs_tol=METRICS)
                assert close or (math.isnan(a[name]) and math.isnan(value)), (name, a[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rlhf_fsdp", "rlhf_deepspeed_stage_1", "rlhf_deepspeed_stage_3"])
def test_only_matrices_are_decayed(tmp_path, strategy):
    for name, how, ranks, decay in (
        ("one", "auto", 1, 0.5),
        ("two", STRATEGIES[strategy], 2, 0.5),
        ("all", "auto", 1, None),
    ):
        run = {
            "kind": "sft",
            "weights": f"{tmp_path}/{name}.safetensors",
            "strategy": how,
            "module": {"heads": 2, "lr": 0.05},
        }
        run["module"] |= {} if decay is None else {"matrix_decay": decay}
        run_ranks("tests.distributed.tasks:train", ranks, [run])
    one, two, everywhere = (f"{tmp_path}/{name}.safetensors" for name in ("one", "two", "all"))
    assert max(largest_differences(one, two).values()) < WEIGHTS
    assert max(largest_differences(one, everywhere).values()) > 0.01


CASES = [pytest.param(*run, marks=() if run in QUICK else pytest.mark.slow) for run in STRATEGY_RUNS]


@pytest.mark.parametrize(("name", "ranks"), CASES, ids=str)
def test_three_updates_equal_those_of_one_process(name, ranks, alone, tmp_path):
    expected, folder = alone
    measured = trained(STRATEGIES[name], ranks, tmp_path)
    for kind in KINDS:
        for answer in measured[kind]:  # every rank logs the same
            assert answer["frozen"]
            assert norm_difference(answer, expected[kind][0]) <= NORMS
            assert_equal_metrics(answer, expected[kind][0])
        file = f"{kind}.safetensors"
        difference = max(largest_differences(tmp_path / file, folder / file).values())
        figures.record("difference of weights", difference)
        assert difference <= WEIGHTS


@pytest.mark.slow
def test_responses_are_resampled_from_those_of_all_ranks(tmp_path):
    answers, files = [], []
    for ranks, strategy in ((1, "auto"), (3, "rlhf_ddp")):
        files.append(tmp_path / f"{ranks}.safetensors")
        run = {"kind": "ppo", "strategy": strategy, "weights": str(files[-1]), "module": {"resampling": True}}
        answers.append(run_ranks("tests.distributed.tasks:train", ranks, [run])[0][0])
    assert_equal_metrics(*answers)
    assert max(largest_differences(*files).values()) <= WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
def test_updates_with_log_probs_of_the_first_forward_pass_equal_those_of_one_process(updates, tmp_path):
    answers, files = [], []
    for ranks, strategy in ((1, "auto"), (3, "rlhf_ddp"), (2, "rlhf_fsdp")):
        files.append(tmp_path / f"{ranks}.safetensors")
        run = {"kind": "ppo", "strategy": strategy, "weights": str(files[-1]), "module": {"updates": updates}}
        answers.append(run_ranks("tests.distributed.tasks:train", ranks, [run])[0][0])
    for answer, file in zip(answers[1:], files[1:], strict=True):
        assert_equal_metrics(answer, answers[0])
        assert max(largest_differences(file, files[0]).values()) <= WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("names_tokens", [True, False])
@pytest.mark.parametrize("kind", ["ppo", "mixture"])
def test_limits_of_the_sampling_give_the_weights_of_one_process(kind, names_tokens, tmp_path):
    limits = {"top_p": 0.8, "top_k": 6, "min_p": 0.02}
    module = {"limits": limits, "names_tokens": names_tokens, "heads": 4, **({"top_k": 4} if kind == "mixture" else {})}
    divided = [f"rlhf_fsdp, {split} parallel 2" for split in ("tensor", "sequence")]
    strategies = ["auto", "rlhf_ddp", "rlhf_fsdp", *divided, "rlhf_deepspeed_stage_3"]
    answers, files = [], []
    for number, strategy in enumerate(strategies):
        files.append(tmp_path / f"{number}.safetensors")
        how = STRATEGIES.get(strategy, strategy)
        run = {"kind": kind, "strategy": how, "weights": str(files[-1]), "module": module}
        answers.append(run_ranks("tests.distributed.tasks:train", 1 if strategy == "auto" else 2, [run])[0][0])
    assert all(1 < step["rollout/allowed_tokens_mean"] < 7 for step in answers[0]["steps"])
    assert any(step["rollout/added_token_fraction"] > 0 for step in answers[0]["steps"]) != names_tokens
    for answer, file in zip(answers[1:], files[1:], strict=True):
        assert_equal_metrics(answer, answers[0])
        assert max(largest_differences(file, files[0]).values()) <= WEIGHTS


MOE = {
    "model_type": "qwen3_moe", "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "norm_topk_prob": True, "num_key_value_heads": 4, "num_attention_heads": 4,
    "head_dim": 8,
}  # fmt: skip


@pytest.mark.slow
def test_experts_of_the_engine_give_the_weights_of_one_process(tmp_path):
    answers, files = [], []
    for strategy in ("auto", "rlhf_ddp", "rlhf_fsdp", "rlhf_fsdp, sequence parallel 2", "rlhf_deepspeed_stage_3"):
        files.append(tmp_path / f"{len(files)}.safetensors")
        how = STRATEGIES.get(strategy, strategy)
        module = {"heads": 4, "architecture": MOE, "routing": [6, 2, 2]}
        run = {"kind": "ppo", "strategy": how, "weights": str(files[-1]), "module": module}
        answers.append(run_ranks("tests.distributed.tasks:train", 1 if strategy == "auto" else 2, [run])[0][0])
    assert all(0.5 < step["router/replaced_fraction"] <= 1 for step in answers[0]["steps"])
    for answer, file in zip(answers[1:], files[1:], strict=True):
        for steps in zip(answer["steps"], answers[0]["steps"], strict=True):
            for step in steps:  # of the tokens of a prompt that other ranks read again
                step.pop("router/replaced_fraction", None)
        assert_equal_metrics(answer, answers[0])
        assert max(largest_differences(file, files[0]).values()) <= WEIGHTS


@pytest.mark.slow
def test_a_reference_that_follows_equals_that_of_one_process_also_after_resuming_on_other_ranks(tmp_path):
    files, answers = [], []
    run = {"kind": "ppo", "module": {"follows": [2, 0.4], "heads": 4}, "trainer": {"max_steps": 5}}

    def train(ranks, strategy, **options):
        files.append(tmp_path / f"{len(files)}.safetensors")
        made = {**run, "strategy": STRATEGIES.get(strategy, strategy), "weights": str(files[-1]), **options}
        answers.append(run_ranks("tests.distributed.tasks:train", ranks, [made])[0][0])

    train(1, "rlhf_single")
    for strategy in ("rlhf_ddp", "rlhf_fsdp", "rlhf_fsdp, tensor parallel 2", "rlhf_fsdp, sequence parallel 2"):
        train(2, strategy)
    train(2, "rlhf_fsdp", save=str(tmp_path / "two.ckpt"), save_at=3)
    train(1, "rlhf_single", ckpt=str(tmp_path / "two.ckpt"))
    plain = tmp_path / "plain.safetensors"
    still = {**run, "module": {"heads": 4}, "strategy": "rlhf_single", "weights": str(plain)}
    run_ranks("tests.distributed.tasks:train", 1, [still])
    assert max(largest_differences(plain, files[0]).values()) > WEIGHTS
    for file in files[1:]:
        assert max(largest_differences(file, files[0]).values()) <= WEIGHTS
    for answer in answers[1:5]:
        assert_equal_metrics(answer, answers[0])


@pytest.mark.slow
def test_conversations_equal_those_of_one_process(tmp_path):
    answers, files = [], []
    for ranks, strategy in ((1, "auto"), (2, "rlhf_ddp"), (3, "rlhf_fsdp"), (2, STRATEGIES["rlhf_deepspeed_stage_3"])):
        files.append(tmp_path / f"{len(files)}.safetensors")
        run = {"kind": "ppo", "strategy": strategy, "weights": str(files[-1]), "module": {"turns": 4}}
        answers.append(run_ranks("tests.distributed.tasks:train", ranks, [run])[0][0])
    assert all(step["env/turns"] > 1.2 and 0 < step["env/written_fraction"] < 1 for step in answers[0]["steps"])
    for answer, file in zip(answers[1:], files[1:], strict=True):
        assert_equal_metrics(answer, answers[0])
        assert max(largest_differences(file, files[0]).values()) <= WEIGHTS


@pytest.mark.slow
def test_asynchronous_rollouts_equal_those_of_one_process_after_resuming_on_other_ranks(tmp_path):
    files = {name: str(tmp_path / f"{name}.safetensors") for name in ("one", "two", "two to one", "one to two")}
    run = {"kind": "ppo", "strategy": "rlhf_fsdp", "module": {"max_staleness": 1}, "trainer": {"max_steps": 4}}
    saved = {ranks: {**run, "save": str(tmp_path / f"{ranks}.ckpt"), "save_at": 2} for ranks in (1, 2)}

    def train(ranks, runs):
        return run_ranks("tests.distributed.tasks:train", ranks, runs)[0]

    def resumed(name, ranks):
        return {**run, "trainer": {"max_steps": 4}, "ckpt": str(tmp_path / f"{ranks}.ckpt"), "weights": files[name]}

    (two,) = train(2, [{**saved[2], "weights": files["two"]}])
    one, two_to_one = train(1, [{**saved[1], "weights": files["one"]}, resumed("two to one", 2)])
    (one_to_two,) = train(2, [resumed("one to two", 1)])
    assert [step["rollout/staleness_mean"] for step in one["steps"]] == [0, 1, 1, 1]
    assert_equal_metrics(two, one)
    for answer in (two_to_one, one_to_two):
        assert answer["steps"][0]["rollout/staleness_mean"] == 1  # the responses of the checkpoint
        assert len(answer["steps"]) == 2
    for name in ("two", "two to one", "one to two"):
        assert max(largest_differences(files[name], files["one"]).values()) <= WEIGHTS, name


@pytest.mark.slow
def test_tensor_parallel_ranks_use_the_same_rewards():
    """The reward differs between processes; different rewards would train the parts of one model differently."""
    strategy = STRATEGIES["rlhf_fsdp, tensor parallel 2"]
    one, other = run_ranks(
        "tests.distributed.tasks:train",
        2,
        [{"kind": "ppo", "strategy": strategy, "module": {"by_chance": True, "heads": 2}}],
    )
    assert_equal_metrics(one[0], other[0])
    assert one[0]["steps"][0]["reward/by_chance"] not in (0.0, 1.0)


def test_compared_weights_have_changed(alone, tmp_path):
    runs = [{"kind": kind, "strategy": "auto", "weights": f"{tmp_path}/{kind}.safetensors",
             "module": {"lr": 0.0, "heads": 4}} for kind in KINDS]  # fmt: skip
    run_ranks("tests.distributed.tasks:train", 1, runs)
    for kind in KINDS:
        file = f"{kind}.safetensors"
        assert min(largest_differences(tmp_path / file, alone[1] / file).values()) > 100 * WEIGHTS


def rows_of(text):
    """Return the rows of the table: strategy, processes, and measured values."""
    return re.findall(r"^\| `(.+?)` \| (\d) \| (.+) \|$", text, re.MULTILINE)


def test_documented_figures_are_for_these_runs_and_within_these_limits():
    rows = rows_of((ROOT / "docs/tested.md").read_text())
    assert [(name, int(ranks)) for name, ranks, _ in rows] == STRATEGY_RUNS
    for _, _, values in rows:
        assert all(float(figure) <= WEIGHTS for figure in values.split(" | "))


def main():
    with tempfile.TemporaryDirectory() as one:
        expected = trained("auto", 1, one)
        print("| strategy | processes | SFT | reward model | PPO actor | PPO critic | gradient norms |")
        print("|---|---|---|---|---|---|---|")
        for name, ranks in STRATEGY_RUNS:
            with tempfile.TemporaryDirectory() as many:
                measured = trained(STRATEGIES[name], ranks, many)
                result = [
                    largest_differences(Path(many, f"{k}.safetensors"), Path(one, f"{k}.safetensors")) for k in KINDS
                ]
                figures = [value for roles in result for value in roles.values()]
                figures.append(max(norm_difference(measured[kind][0], expected[kind][0]) for kind in KINDS))
                print(f"| `{name}` | {ranks} | " + " | ".join(f"{figure:.1e}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
