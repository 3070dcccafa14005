"""Commands of the Makefile, and the modules under benchmarks/, run with small sizes."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.compare import __main__ as command
from benchmarks.compare import costs, task, tools
from benchmarks.learning import __main__ as learning
from benchmarks.learning import tasks
from benchmarks.learning.tasks import TASKS
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from tests.stand_ins import TinyModel

ROOT = Path(__file__).parents[1]
TARGETS = {
    "quickstart": "tests/learning/test_quickstart.py",
    "docs": "tests/test_site.py",
    "mutants": "tests/test_documented_commands.py",
    "proofs": "tests/test_documented_commands.py",
    "benchmark": "tests/test_documented_commands.py",
    "benchmark-learning": "tests/test_documented_commands.py",
    "release": "tests/test_documented_commands.py",
    **dict.fromkeys(
        ("help", "install", "test", "test-core", "test-all", "test-gpu", "lint", "lock", "clean"),
        "the work on the project",
    ),
}
MODULES = {
    **dict.fromkeys(("compare/__main__", "compare/ours", "compare/task", "compare/meter"), "test_benchmark"),
    **dict.fromkeys(("compare/costs", "compare/divergence", "compare/floor", "compare/head_memory"), "here"),
    "compare/tools": "test_benchmark",
    "compare/lifecycle": "test_benchmark_of_start_checkpoints_and_resume",
    "compare/servers": "test_benchmark_of_servers",
    **dict.fromkeys(("learning/__main__", "learning/ours", "learning/tasks"), "test_benchmark_of_learning"),
    "learning/__init__": "empty",
    "learning/trl_runs": "not run: it needs TRL in a separate environment",
    "compare/trl_runs": "not run: it needs TRL in a separate environment",
    "compare/__init__": "empty",
    **dict.fromkeys(
        ("acceptance_measurements", "acceptance_points", "acceptance_runs", "acceptance_trainer", "gpu_acceptance"),
        "tests/test_gpu_acceptance.py",
    ),
    "packages_to_carry": "tests/test_packages_to_carry.py",
    "first_gpu_run": "tests/test_first_gpu_run.py",
    "scaling_tables": "tests/extras/plan/test_scaling_tables.py",
    "step_times": "tests/extras/plan/test_step_times.py",
    "slow_links": "test_bytes_on_a_slow_link",
    "scoreboard": "tests/test_scoreboard.py",
}


def run(*arguments, **options):
    """Run a module of the project and return its output."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with the data of the benchmark, and a model that was trained for some steps."""
    directory = tmp_path_factory.mktemp("benchmark")
    task.prepare(directory, warm_steps=20)  # responses that end
    tools.prepare(directory / "tools", warm_steps=5)
    return directory


def test_every_target_and_module_is_run_by_a_test():
    assert set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) == set(TARGETS)
    files = (ROOT / "benchmarks").rglob("*.py")
    assert {str(file.relative_to(ROOT / "benchmarks").with_suffix("")) for file in files} == set(MODULES)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["sft", "sft-4096", "dpo", "grpo", "ppo", "distillation", "tools", "images", "images-sft"]
)
def test_benchmark(prepared, monkeypatch, tmp_path, name):
    kinds = {"lightning-rlhf": (None, name), "again": (None, name)}
    monkeypatch.setattr(command, "RUNS", {name: kinds})
    page = tmp_path / "page.md"
    options = ["--tasks", name, "--rounds", "1", "--steps", "1", "--others", "--directory", str(prepared)]
    monkeypatch.setattr(sys, "argv", ["compare", *options, "--write", str(page)])
    command.main()
    lines = page.read_text().splitlines()
    assert sum(line.startswith(("| lightning-rlhf | 1 |", "| again | 1 |")) for line in lines) == 2
    assert any(line.startswith("| grpo, lightning-rlhf |") for line in lines) == (name == "grpo")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_benchmark_of_start_checkpoints_and_resume(prepared, monkeypatch):
    (prepared / "smollm2").mkdir(exist_ok=True)
    for name in ("model", "tokenizer", "problems.jsonl"):  # the small model in the place of SmolLM2
        (prepared / "smollm2" / name).symlink_to(prepared / name)
    for part in ("start-sft", "save", "resume"):
        run("-m", "benchmarks.compare.lifecycle", "ours", part, prepared, prepared / f"{part}.json")
        measured = json.loads((prepared / f"{part}.json").read_text())
        assert all(value > 0 for value in measured.values())
        assert ("wait" in measured) == (part == "save")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["push", "engine", "vllm", "start"])
def test_benchmark_of_costs(prepared, part):
    run("-m", "benchmarks.compare.costs", prepared, part)
    measured = json.loads((prepared / f"costs-{part}.json").read_text())
    assert measured
    assert all(value > 0 for value in measured.values())
    assert part != "start" or measured.keys() == costs.COMMANDS.keys()


@pytest.mark.slow
def test_benchmark_of_a_loss_of_distillation():
    assert json.loads(run("-m", "benchmarks.compare.divergence", "ours", 16, 512).splitlines()[-1])["loss"] > 0


@pytest.mark.slow
def test_benchmark_of_products_and_of_the_memory_of_the_head(prepared):
    assert sum(json.loads(run("-m", "benchmarks.compare.floor", prepared / "model", 100, 50)).values()) > 0
    assert int(run("-m", "benchmarks.compare.head_memory", 1000)) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_benchmark_of_servers():
    assert "two servers: " in run("-m", "benchmarks.compare.servers")


def curve(*accuracies):
    """Points of a run whose steps take a second of processor time and two of wall time; the last value remains."""
    accuracies += accuracies[-1:] * 2
    return [{"step": i, "cpu": float(i), "wall": 2.0 * i, "accuracy": value} for i, value in enumerate(accuracies)]


def test_page_of_learning_shows_the_first_to_reach_the_target_and_who_does_not(monkeypatch, tmp_path):
    (tmp_path / "addition").mkdir()
    small = replace(TASKS["addition"], variants=("full-float32",), rates={"full": (1e-4, 2e-4, 4e-4)}, sweep_seeds=1)
    monkeypatch.setattr(learning, "TASKS", {"addition": small})
    runs = learning.sweep(small, "full-float32")
    curves = {"ours": [(0.2, 0.9, 0.4), (0.2, 0.9, 1.0), (0.2, 0.7, 0.9)],  # the first touches the target and falls
              "trl": [(0.2, 0.3, 0.9), (0.2, 0.2, 0.2), (0.2, 0.1, 0.1)]}  # fmt: skip
    for library, group in runs.items():
        for run, accuracies in zip(group, curves[library], strict=True):
            run.file(tmp_path).write_text(json.dumps(curve(*accuracies)))
    for run, accuracies in ((runs["ours"][1], (0.2, 0.5, 0.9)), (runs["trl"][0], (0.2, 0.3, 0.7))):
        run._replace(seed=2).file(tmp_path).write_text(json.dumps(curve(*accuracies)))
    learning.save(tmp_path, tmp_path / "all.json")
    (tmp_path / "restored/images").mkdir(parents=True)
    measured = learning.restore(tmp_path / "restored", tmp_path / "all.json")
    page = learning.report(tmp_path / "restored", {"addition": 2}, tmp_path, measured)
    assert page == learning.report(tmp_path, {"addition": 2}, None, measured)
    assert f"Measured on {measured['date']}: {measured['machine']}" in page
    assert "| full, float32 | lightning-rlhf | 0.0002 | 2 | 0.80 | 1.5 ± 6.4 | - |" in page
    assert "| full, float32 | TRL 1.16 | 0.0001 | 2 | 0.80 | not reached by 1 of 2 |" in page
    assert page.count("\n| full, float32 |") == 8  # two rows, six of the sweep
    assert (tmp_path / "learning_addition_full-float32.svg").read_text().count("<polyline") == 4


@pytest.mark.parametrize("begin", ["", "abcab"])
def test_evaluation_of_learning_answers_each_prompt_as_if_it_were_alone(monkeypatch, tmp_path, begin):
    prompts = [begin + end for end in ("abc", "c", "cba", "bacbacb", "ca")]
    (tmp_path / "addition").mkdir()
    (tmp_path / "addition" / "val.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "answer": prompt}) + "\n" for prompt in prompts)
    )
    answered = {}

    def reward(texts, answers, finished):
        answered.update(zip(answers, texts, strict=True))
        return [0.0] * len(texts)

    monkeypatch.setitem(tasks.REWARDS, TASKS["addition"].rows, reward)
    tokenizer, lm = CharacterTokenizer("abcdefgh").load(), TinyModel(seed=3).causal().lm
    evaluation = tasks.Evaluation("addition", tmp_path, tokenizer, "float32")
    assert evaluation.shared == len(begin)
    assert evaluation(lm) == 0.0
    assert answered.keys() == set(prompts)
    for prompt, answer in answered.items():
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        length = TASKS["addition"].response_tokens
        alone = lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
        assert answer == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


def test_rate_is_the_one_that_most_seeds_reach_and_then_the_fastest(monkeypatch, tmp_path):
    (tmp_path / "addition").mkdir()
    small = replace(TASKS["addition"], variants=("full-float32",), rates={"full": (1e-4, 2e-4, 4e-4)})
    monkeypatch.setattr(learning, "TASKS", {"addition": small})
    runs = learning.sweep(small, "full-float32")
    seeds = {1e-4: [(0.2, 0.3, 0.9), (0.2, 0.3, 0.9)], 2e-4: [(0.2, 0.9), (0.2, 0.9, 0.1)], 4e-4: [(0.2, 0.9), (0.2,)]}
    for run in [run for group in runs.values() for run in group]:
        for seed, accuracies in enumerate(seeds[run.rate], 1):
            run._replace(seed=seed).file(tmp_path).write_text(json.dumps(curve(*accuracies)))
    target, best = learning.best_of(runs, tmp_path, 2)
    assert (target, best["ours"].rate, best["trl"].rate) == (pytest.approx(0.72), 1e-4, 1e-4)
    run.file(tmp_path).unlink()
    assert learning.best_of(runs, tmp_path, 2) is None


def test_ratio_has_the_interval_of_logarithms_and_a_gpu_counts_wall_seconds():
    # means 2 and 1, variances 0.5 and 0.02 of two each: exp(12.706 * sqrt(0.5 / 2 / 4 + 0.02 / 2)) = 30.6
    assert learning.ratio([1.5, 2.5], [0.9, 1.1]) == "2.00 (0.07 to 61.21)"
    assert learning.ratio([2.0], [1.0]) == "2.00"
    assert learning.ratio([2.0, math.inf], [1.0, 1.0]) == "-"
    assert learning.clock_of(curve(0.1)) == "cpu"
    assert learning.clock_of([point | {"gpus": 1} for point in curve(0.1)]) == "wall"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_benchmark_of_learning(monkeypatch, tmp_path):
    task = replace(TASKS["addition"], variants=("lora-bfloat16",), rates={"lora": (1e-3,)})
    monkeypatch.setattr(learning, "TASKS", {"addition": task})
    execute = learning.execute

    def without_peer(run, directory, *how):
        if run.library == "trl":  # which is not installed where the tests run
            run.file(directory).write_text(json.dumps(curve(0.2, 0.9)))
        else:
            execute(run, directory, *how)

    monkeypatch.setattr(learning, "execute", without_peer)
    page = tmp_path / "docs/page.md"
    (page.parent / "images").mkdir(parents=True)
    options = ["--tasks", "addition", "--seeds", "1", "--directory", str(tmp_path / "runs"), "--write", str(page)]
    monkeypatch.setattr(sys, "argv", ["learning", *options])
    learning.main()
    points = json.loads((tmp_path / "runs/addition/ours-lora-bfloat16-0.001-1.json").read_text())
    assert [point["step"] for point in points] == [*range(task.steps + 1)]
    assert points[-1]["accuracy"] > points[0]["accuracy"] + 0.3
    assert "| lora, bfloat16 | lightning-rlhf | 0.001 | 1 |" in page.read_text()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_bytes_on_a_slow_link():
    if (
        os.geteuid() != 0
        or subprocess.run(["ip", "netns", "add", "rlhfa"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine makes no network namespaces")
    subprocess.run(["ip", "netns", "delete", "rlhfa"], check=True)
    printed = run("-m", "benchmarks.slow_links", "--strategies", "rlhf_ddp", "--rates", "20", "100")
    counted, sent = re.search(r"\| `rlhf_ddp` \| learning \| ([\d,]+) \| ([\d,]+) \|", printed).groups()
    assert 1.0 <= float(sent.replace(",", "")) / float(counted.replace(",", "")) < 1.02


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_promise_is_checked(tmp_path):
    page = tmp_path / "proofs.md"
    page.write_text('| <a id="conversations"></a>Conversations | old |\n| <a id="losses"></a>Losses | stays |\n')
    printed = run("-m", "tests.proofs", "conversations", "--page", page)
    row = re.search(r"^.*Conversations \|.*\| [1-9]\d* tests \| passes \|.*$", printed, re.MULTILINE)[0]
    assert page.read_text().splitlines() == [row, '| <a id="losses"></a>Losses | stays |']


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutants_of_a_file_are_tried():
    printed = run("-m", "tests.mutants", "functional/kl.py", "--every", "6")
    tried, killed = map(int, re.search(r"^all: ([1-9]\d*) mutants, (\d+) killed", printed, re.MULTILINE).groups())
    assert killed == tried


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_release_is_checked(tmp_path):
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("the check of a release uses .venv, which make install creates")
    run("-m", "build", "--no-isolation", "--outdir", tmp_path)
    done = subprocess.run(
        ["constraints/check_release.sh", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "work" in done.stdout
