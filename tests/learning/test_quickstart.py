"""The quickstart as documented: three commands, vLLM, and the published results."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests import figures

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "quickstart_ppo.csv"
pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.vllm, pytest.mark.timeout(1200)]


def read(path):
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of the three runs, and their output."""
    pytest.importorskip("vllm")
    directory = tmp_path_factory.mktemp("quickstart")
    for stage in ("sft", "reward", "ppo"):
        command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", ROOT / f"configs/quickstart/{stage}.yaml"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "warning" not in (done.stdout + done.stderr).lower()
        (directory / f"{stage}.txt").write_text(done.stdout)
    return directory


def assert_learned(metrics):
    validations = [row for row in metrics if "val/fraction_correct_sampled" in row]
    before, after = validations[0], validations[-1]
    for moment, row in (("before", before), ("after", after)):
        figures.record(moment, row["val/fraction_correct_greedy"])
    assert before["val/fraction_correct_sampled"] <= 0.60
    assert before["val/fraction_correct_greedy"] <= 0.45
    assert after["val/fraction_correct_sampled"] >= 0.93
    assert after["val/fraction_correct_greedy"] >= 0.97


def test_policy_learns_to_carry_from_the_reward_model(runs):
    assert_learned(read(runs / "runs/quickstart/ppo/metrics.csv"))


def test_policy_learns_equally_with_asynchronous_rollouts(runs):
    configs = [ROOT / f"configs/quickstart/{name}.yaml" for name in ("ppo", "ppo_one_step_ahead")]
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", configs[0], "--config", configs[1]]
    done = subprocess.run(command, cwd=runs, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = read(runs / "runs/quickstart/ppo_one_step_ahead/metrics.csv")
    assert [row["rollout/staleness_max"] for row in metrics if "rollout/staleness_max" in row] == [0] + 19 * [1]
    assert_learned(metrics)


def test_reward_model_is_accurate_before_ppo_starts(runs):
    assert "reward model: orders correctly" in (runs / "ppo.txt").read_text()
    validation = next(row for row in read(runs / "runs/quickstart/reward/metrics.csv") if "val/pair_accuracy" in row)
    assert validation["val/pair_accuracy"] >= 0.95


def test_learning_curve_equals_the_recorded_one(runs):
    # The same seed on another processor rounds otherwise, so its samples differ: the shape is the same, not the bits.
    golden, now = (
        [row for row in read(p) if "reward/mean" in row] for p in (GOLDEN, runs / "runs/quickstart/ppo/metrics.csv")
    )
    assert [row["step"] for row in now] == [row["step"] for row in golden]
    for name, tolerance in (("reward/mean", 0.2), ("reward/accuracy", 0.12)):
        gaps = [abs(a[name] - b[name]) for a, b in zip(now, golden, strict=True)]
        assert sum(gaps) / len(gaps) < tolerance, (name, gaps)


def test_report_shows_all_documented_parts(runs):
    printed = (runs / "ppo.txt").read_text()
    for part in (
        "correct answers, greedy",
        "KL to the reference",
        "tokens per second",
        "Time of the steps",
    ):
        assert part in printed
    assert printed.rstrip().endswith("ended after step 20: max_steps is 20; results are in runs/quickstart/ppo")


def test_export_is_loaded_by_transformers_and_vllm(runs):
    transformers = pytest.importorskip("transformers")
    export = runs / "runs/quickstart/ppo/export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    prompt = tokenizer("457+368=", return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = tokenizer.decode(model.generate(prompt, max_new_tokens=40, do_sample=False)[0], skip_special_tokens=True)
    assert answer == "457+368=7+8+0=15 5+6+1=12 4+3+1=08:825"
    code = (
        "from vllm import LLM, SamplingParams; import sys;"
        "llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 28);"
        "out = llm.generate(['457+368='], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False);"
        "print('ANSWER', out[0].outputs[0].text)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(export)], capture_output=True, text=True, check=False)
    assert "7+8+0=15" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_finished_run_resumes_and_ends_immediately(runs):
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", ROOT / "configs/quickstart/ppo.yaml"]
    done = subprocess.run([*command, "--ckpt_path", "last"], cwd=runs, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert max(row["step"] for row in read(runs / "runs/quickstart/ppo/metrics.csv")) == 20


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_saved_configuration_can_be_run(runs, stage):
    saved = runs / f"runs/quickstart/{stage}/config.yaml"
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", saved, "--trainer.fast_dev_run", "2"]
    done = subprocess.run(command, cwd=runs, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
