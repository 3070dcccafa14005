"""A scoreboard for a machine with a GPU: GSM8K, two models, two algorithms, five seeds, beside published results.

    python -m benchmarks.scoreboard --data data/gsm8k                          hours for each of twenty runs
    python -m benchmarks.scoreboard --data data/gsm8k --seeds 1 --models Qwen/Qwen2.5-0.5B-Instruct
    python -m benchmarks.scoreboard --data data/gsm8k --models models/smollm2 --small     a try on a CPU, in minutes

``data`` needs train.jsonl and test.jsonl of https://github.com/openai/grade-school-math. Each run is a configuration in
the folder of results and ``lightning-rlhf fit`` with it. Runs that have ended are not repeated. At the end,
scoreboard.json and scoreboard.md in that folder are what you can send us.
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct")
ALGORITHMS = ("grpo", "ppo")
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of Student's t for a number of seeds
# verl's docs/algo/baseline.md of November 2026; TRL's documentation publishes none for these models.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": [
        ("before training (Qwen's own figure)", 0.496),
        ("verl, PPO", 0.567),
        ("verl, GRPO with LoRA", 0.543),
        ("verl, PRIME", 0.587),
    ],
    "Qwen/Qwen2.5-1.5B-Instruct": [("verl, GRPO with LoRA", 0.779)],
}
FIGURES = {
    "strict": "right number after `####`, greedy",
    "lenient": "right last number, greedy",
    "tokens_per_s": "tokens per second of a step",
    "mfu_update": "fraction of the peak in updates",
    "memory_gib": "peak memory, GiB",
    "hours": "hours",
}


class Sizes(NamedTuple):
    """Sizes of the runs."""

    prompts: int
    group: dict[str, int]
    minibatch: dict[str, int]
    prompt_tokens: int
    response_tokens: int
    steps: int
    val_every: int
    val_rows: int | None


WHOLE = Sizes(256, {"grpo": 5, "ppo": 1}, {"grpo": 320, "ppo": 64}, 512, 512, 200, 50, None)
SMALL = Sizes(4, {"grpo": 4, "ppo": 2}, {"grpo": 8, "ppo": 4}, 256, 24, 2, 2, 8)


class Run(NamedTuple):
    """A run of the scoreboard."""

    model: str
    algorithm: str
    seed: int

    def folder(self, results: Path) -> Path:
        """Return its directory."""
        return results / f"{self.model.strip('/').replace('/', '--')}-{self.algorithm}-{self.seed}"


def write_rows(data: Path, results: Path, sizes: Sizes) -> None:
    """Write the rows with verl's instruction."""
    for source, name in (("train", "train"), ("test", "val")):
        lines = [json.loads(line) for line in (data / f"{source}.jsonl").read_text().splitlines()]
        lines = lines[: sizes.val_rows] if name == "val" else lines
        rows = [
            {
                "prompt": f"{line['question']} {INSTRUCTION}",
                "ground_truth": line["answer"].rpartition("####")[2].strip(),
            }
            for line in lines
        ]
        (results / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def configuration(run: Run, results: Path, sizes: Sizes) -> dict[str, Any]:
    """Return the configuration of a run."""
    on_gpu = torch.cuda.is_available()
    model: dict[str, Any] = {
        "actor": run.model,
        "minibatch_size": sizes.minibatch[run.algorithm],
        "optimizer": {"lr": 1e-6, "weight_decay": 0.01},
    }
    if run.algorithm == "grpo":
        model |= {"kl_loss": {"coef": 0.001, "estimator": "k3"}}
    else:
        model |= {"critic": "actor", "kl_reward": {"coef": 0.001, "estimator": "k1"}}
        model |= {"critic_optimizer": {"lr": 1e-5, "weight_decay": 0.01}}
    rules = "lightning_rlhf.rewards.rules.gsm8k_"
    loop = {
        "rewards": [
            {"function": f"{rules}strict", "name": "strict"},
            {"function": f"{rules}lenient", "name": "lenient", "weight": 0.0},
        ],
        "group_size": sizes.group[run.algorithm],
        "max_response_tokens": sizes.response_tokens,
        "val_metric": "strict",
    }
    return {
        "seed_everything": run.seed,
        "model": {"class_path": f"lightning_rlhf.{run.algorithm.upper()}Module", "init_args": model},
        "data": {
            "class_path": "lightning_rlhf.PromptDataModule",
            "init_args": {
                "tokenizer": run.model, "train": str(results / "train.jsonl"), "val": str(results / "val.jsonl"),
                "as_messages": True, "max_tokens": sizes.prompt_tokens, "too_long": "drop", "batch_size": sizes.prompts,
            },
        },
        "trainer": {
            "max_steps": sizes.steps,
            "val_check_interval": sizes.val_every,
            "precision": "bf16-mixed" if on_gpu else "32-true",
            "devices": 1,
            "callbacks": [
                {"class_path": "lightning_rlhf.callbacks.RolloutLoop", "init_args": loop},
                {
                    "class_path": "lightning_rlhf.callbacks.RunCheckpoint",
                    "init_args": {"every_n_steps": sizes.val_every},
                },
                {"class_path": "lightning_rlhf.callbacks.Report"},
            ],
            "default_root_dir": str(run.folder(results)),
        },
    }  # fmt: skip


def execute(run: Run, results: Path, sizes: Sizes) -> bool:
    """Train, or resume; return whether it ended."""
    folder = run.folder(results)
    file = results / f"{folder.name}.yaml"
    text = yaml.safe_dump(configuration(run, results, sizes), sort_keys=False)
    if file.exists() and file.read_text() != text:
        raise SystemExit(f"{file} is of a run with other settings: choose another --results, or remove it and {folder}")
    file.write_text(text)
    if ended(folder):
        return True
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(file), "--ckpt_path", "last"]
    with (results / f"{folder.name}.log").open("a") as output:
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ}, stdout=output, stderr=output, check=False
        ).returncode
    print(f"{folder.name}: ended with {code}", flush=True)
    return code == 0


def ended(folder: Path) -> bool:
    """Return whether a run ended without an error; it says so in a file."""
    file = folder / "end.json"
    return file.exists() and json.loads(file.read_text()) == {"error": None}


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    """Return the values of a metric."""
    return [float(row[name]) for row in rows if row.get(name)]


def measured(folder: Path) -> dict[str, float]:
    """Return the figures of a run, as far as it logged them."""
    file = folder / "metrics.csv"
    if not file.exists():
        return {}
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    figures = {}
    for name in ("strict", "lenient"):
        if values := column(rows, f"val/{name}_greedy"):
            figures |= {f"{name}_before": values[0], name: values[-1]}
    for name, metric in (("tokens_per_s", "perf/tokens_per_s"), ("mfu_update", "perf/mfu_update")):
        if values := column(rows, metric):
            figures[name] = statistics.median(values)
    if values := column(rows, "perf/memory_allocated_gib") or column(rows, "perf/cpu_memory_gib"):
        figures["memory_gib"] = max(values)
    if values := column(rows, "time/step_s"):
        figures["hours"] = sum(values) / 3600
    return figures


def interval(values: list[float]) -> str:
    """Return a mean with its 95 % interval over seeds."""
    center = statistics.mean(values)
    digits = 1 if center >= 10 else 3
    if len(values) < 2:
        return f"{center:.{digits}f}"
    half = T.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{center:.{digits}f} ± {half:.{digits}f}"


def page(scores: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Scoreboard: GSM8K",
        "",
        f"{scores['device']}, {', '.join(f'{k} {v}' for k, v in scores['versions'].items())}.",
    ]
    if scores["small"]:
        lines += ["", "**A small try**: these figures say nothing about quality or speed."]
    for model in dict.fromkeys(run["model"] for run in scores["runs"]):
        lines += [
            "",
            f"## {model}",
            "",
            f"| run | seeds | {' | '.join(FIGURES.values())} |",
            "|---" * (len(FIGURES) + 2) + "|",
        ]
        for algorithm in ALGORITHMS:
            group = [run["figures"] for run in scores["runs"] if (run["model"], run["algorithm"]) == (model, algorithm)]
            group = [figures for figures in group if "strict" in figures]
            if not group:
                continue
            before = [interval([figures[f"{name}_before"] for figures in group]) for name in ("strict", "lenient")]
            lines.append(
                f"| before {algorithm.upper()} | {len(group)} | {' | '.join(before)} |{' - |' * (len(FIGURES) - 2)}"
            )
            cells = [
                interval([figures[name] for figures in group]) if all(name in figures for figures in group) else "-"
                for name in FIGURES
            ]
            lines.append(f"| {algorithm.upper()} | {len(group)} | {' | '.join(cells)} |")
        for what, value in PUBLISHED.get(model, []):
            lines.append(f"| {what}, published | - | {value:.3f} |{' - |' * (len(FIGURES) - 1)}")
    missing = [f"{run['model']} {run['algorithm']} seed {run['seed']}" for run in scores["runs"] if not run["ended"]]
    lines += ["", f"Did not end: {', '.join(missing)}." if missing else "All runs ended."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train what is missing, and write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help=f"of each run, {WHOLE.steps} without it")
    parser.add_argument("--small", action="store_true", help="two steps on a few rows, to see that everything works")
    parser.add_argument("--results", type=Path, default=Path("runs/scoreboard"))
    options = parser.parse_args()
    sizes = SMALL if options.small else WHOLE
    sizes = sizes._replace(steps=options.steps or sizes.steps)
    if missing := [name for name in ("train.jsonl", "test.jsonl") if not (options.data / name).is_file()]:
        parser.error(f"{options.data} has no {missing[0]}: get it from https://github.com/openai/grade-school-math")
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    write_rows(options.data, results, sizes)
    runs = [
        Run(model, algorithm, seed)
        for seed in range(1, options.seeds + 1)  # a first seed of everything comes first
        for model in options.models
        for algorithm in options.algorithms
    ]
    outcomes = [(run, execute(run, results, sizes)) for run in runs]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    packages = ("torch", "vllm", "transformers", "lightning")
    scores = {
        "device": device,
        "small": options.small,
        "versions": {name: version_of(name) for name in packages},
        "sizes": sizes._asdict(),
        "runs": [
            {**run._asdict(), "ended": ended_well, "figures": measured(run.folder(results))}
            for run, ended_well in outcomes
        ],
    }
    (results / "scoreboard.json").write_text(json.dumps(scores, indent=1))
    (results / "scoreboard.md").write_text(page(scores))
    print(page(scores))
    print(f"Please send {results / 'scoreboard.json'}")
    sys.exit(not all(well for _, well in outcomes))


def version_of(name: str) -> str:
    """Return the version of a package, also of vLLM's build for CPUs."""
    for package in (name, f"{name}-cpu"):
        try:
            return version(package)
        except ModuleNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    main()
