"""Time to accuracy against TRL: ``python -m benchmarks.learning``, or ``make benchmark-learning``; hours on two cores.

Both libraries train the same model on the same rows, with the same number of responses and updates, and the same
function evaluates both while the clock stands still. The learning rate is swept for each library over the same values
with the first seed. The one that reaches the target first is then run with further seeds. Results stay in the
directory, so a second call goes on where the first one ended. The same command runs on a GPU.
"""

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare.__main__ import peer_python
from benchmarks.learning.tasks import TASKS, Task, prepare
from lightning_rlhf.expected_errors import counted
from tests.proofs import machine

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"ours": "lightning-rlhf", "trl": "TRL 1.16"}
PPO_PEER = "TRL 1.12"  # the last release with PPO
PART = 0.8  # of the best final accuracy of both libraries: the target
LAST = 3  # evaluations whose mean is the final accuracy
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of Student's t for a number of seeds
COLORS = {"ours": "#2a78d6", "trl": "#d9822b"}


class Run(NamedTuple):
    """A run and the file of its curve."""

    library: str
    task: str
    variant: str
    rate: float
    seed: int

    def file(self, directory: Path) -> Path:
        """Return where its curve is."""
        return directory / self.task / f"{self.library}-{self.variant}-{self.rate:g}-{self.seed}.json"

    def curve(self, directory: Path) -> list[dict[str, float]]:
        """Return its points, or none if it did not run."""
        file = self.file(directory)
        points: list[dict[str, float]] = json.loads(file.read_text()) if file.exists() else []
        return points


def name_of(run: Run) -> str:
    """Return the library of a run with its version."""
    return PPO_PEER if run.library == "trl" and TASKS[run.task].algorithm == "ppo" else LIBRARIES[run.library]


def execute_all(runs: Iterable[Run], directory: Path, threads: int, at_once: int) -> None:
    """Run some trainings, in this order."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda run: execute(run, directory, threads, at_once), runs))


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def execute(run: Run, directory: Path, threads: int, at_once: int) -> None:
    """Run one training unless its result exists."""
    file = run.file(directory)
    if file.exists():
        return
    ours = run.library == "ours"
    peer = "trl-ppo" if TASKS[run.task].algorithm == "ppo" else "trl"
    python = sys.executable if ours else str(peer_python(peer, directory))
    command = [python, "-m", f"benchmarks.learning.{'ours' if ours else 'trl_runs'}", run.task, run.variant]
    command += [f"{run.rate:g}", str(run.seed), str(directory), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    environment["MASTER_PORT"] = str(free_port())  # of TRL's vLLM, which otherwise has the same in each run
    with file.with_suffix(".log").open("w") as output:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
    if ended.returncode or not file.exists():
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}, see {file.with_suffix('.log')}")
    points = run.curve(directory)
    points[0]["runs at once"] = at_once
    file.write_text(json.dumps(points))
    last = points[-1]
    print(f"{run}: {last['accuracy']:.3f} after {last['cpu']:.0f} CPU s", flush=True)


def reached(points: list[dict[str, float]], target: float, which: str) -> float:
    """Return the seconds or the step from which on all evaluations reach the target, or infinity."""
    below = max((i for i, point in enumerate(points) if point["accuracy"] < target), default=-1)
    return points[below + 1][which] if below + 1 < len(points) else math.inf


def touched(points: list[dict[str, float]], target: float, which: str) -> float:
    """Return the seconds at the first evaluation that reaches the target, or infinity."""
    return next((point[which] for point in points if point["accuracy"] >= target), math.inf)


def final(points: list[dict[str, float]]) -> float:
    """Return the final accuracy: the mean of the last evaluations, because one of them is noisy."""
    return statistics.mean(point["accuracy"] for point in points[-LAST:])


def clock_of(points: list[dict[str, float]]) -> str:
    """Return the time that counts: processor seconds, or wall seconds if there is a GPU."""
    return "wall" if points[0].get("gpus") else "cpu"


def sweep(task: Task, variant: str) -> dict[str, list[Run]]:
    """Return the runs of the first seed of each library, one for each learning rate."""
    rates = task.rates[variant.split("-")[0]]
    return {library: [Run(library, task.name, variant, rate, 1) for rate in rates] for library in LIBRARIES}


def best_of(runs: dict[str, list[Run]], directory: Path, seeds: int) -> tuple[float, dict[str, Run]] | None:
    """Return the target, and for each library the rate that reaches it first; None if a run is missing.

    Args:
        runs: runs of the first seed, see :func:`sweep`.
        seeds: number of seeds with which the rates are swept.

    Returns:
        Rates are compared by the number of seeds that reach the target, then by the mean time of those.
    """
    curves = {run: seeds_of(run, seeds, directory) for group in runs.values() for run in group}
    if any(len(group) < seeds for group in curves.values()):
        return None
    finals = {run: statistics.mean(map(final, group)) for run, group in curves.items()}
    target = PART * max(finals.values())

    def order(run: Run) -> tuple[int, float, float]:
        times = [reached(points, target, clock_of(points)) for points in curves[run]]
        known = [seconds for seconds in times if math.isfinite(seconds)]
        return len(times) - len(known), statistics.mean(known or [math.inf]), -finals[run]

    return target, {library: min(group, key=order) for library, group in runs.items()}


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Return a ratio of means with its 95 % interval, which is that of a log-ratio; a dash if a run has no time."""
    if not all(map(math.isfinite, [*ours, *theirs])):
        return "-"
    means = statistics.mean(ours), statistics.mean(theirs)
    if len(ours) < 2 or len(theirs) < 2:
        return f"{means[0] / means[1]:.2f}"
    parts = zip((ours, theirs), means, strict=True)
    deviation = math.sqrt(sum(statistics.variance(values) / len(values) / center**2 for values, center in parts))
    factor = math.exp(T.get(min(len(ours), len(theirs)), 1.96) * deviation)
    return f"{means[0] / means[1]:.2f} ({means[0] / means[1] / factor:.2f} to {means[0] / means[1] * factor:.2f})"


def mean(values: list[float], digits: int = 1) -> str:
    """Return a mean with its 95 % interval."""
    if any(math.isinf(value) for value in values):
        missed = sum(map(math.isinf, values))
        return f"not reached by {missed} of {len(values)}" if len(values) > 1 else "not reached"
    center = statistics.mean(values)
    if len(values) < 2:
        return f"{center:.{digits}f}"
    half = T.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{center:.{digits}f} ± {half:.{digits}f}"


def seeds_of(best: Run, seeds: int, directory: Path) -> list[list[dict[str, float]]]:
    """Return the curves of a learning rate that exist."""
    curves = [best._replace(seed=seed).curve(directory) for seed in range(1, seeds + 1)]
    return [curve for curve in curves if curve]


def drawing(curves: dict[str, list[list[dict[str, float]]]], target: float, names: dict[str, str]) -> str:
    """Return a picture of accuracy against processor seconds: a line for each seed."""
    width, height, left, low = 640, 300, 50, 40
    clock = clock_of(next(iter(curves.values()))[0])
    longest = max(curve[-1][clock] for group in curves.values() for curve in group) or 1.0

    def at(cpu: float, accuracy: float) -> str:
        return f"{left + cpu / longest * (width - left - 10):.1f},{height - low - accuracy * (height - low - 30):.1f}"

    x, y = at(0, target).split(",")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{x},{y}H{width - 10}" stroke="#999" stroke-dasharray="4 3"/>',
        f'<text x="{width - 14}" y="{float(y) - 4}" text-anchor="end" fill="#666">target {target:.2f}</text>',
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(0, value).split(",")
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4}" text-anchor="end" fill="#444">{value:g}</text>')
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, _ = at(part * longest, 0).split(",")
        anchor = "end" if part == 1 else "middle"
        parts.append(f'<text x="{x}" y="{height - low + 18}" text-anchor="{anchor}">{part * longest:.0f}</text>')
    unit = "CPU seconds" if clock == "cpu" else "wall seconds"
    parts.append(f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">{unit} of training</text>')
    for number, (library, group) in enumerate(curves.items()):
        color = COLORS[library]
        parts.append(f'<text x="{left + 160 * number}" y="18" fill="{color}">{names[library]}</text>')
        for curve in group:
            points = " ".join(at(point[clock], point["accuracy"]) for point in curve)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5" opacity="0.75"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def save(directory: Path, file: Path) -> None:
    """Write all curves to one file, with the machine and the date."""
    lines = []
    for path in sorted(directory.glob("*/*-*-*.json")):
        points = [
            {name: value for name, value in point.items() if not math.isnan(value)}
            for point in json.loads(path.read_text())
        ]
        lines.append(f"{json.dumps(str(path.relative_to(directory)))}: {json.dumps(points, separators=(',', ':'))}")
    described = json.dumps({"machine": machine(), "date": f"{date.today():%d %B %Y}"}).removesuffix("}")
    file.write_text(described + ', "curves": {\n' + ",\n".join(lines) + "\n}}\n")


def restore(directory: Path, file: Path) -> dict[str, str]:
    """Write the curves of a file into the directory, for more of them on the same machine, or for the page.

    Returns:
        ``machine`` and ``date`` of the file.
    """
    described: dict[str, Any] = json.loads(file.read_text())
    for name, points in described.pop("curves").items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(points))
    return described


def report(directory: Path, seeds: dict[str, int], pictures: Path | None, measured: dict[str, str]) -> str:
    """Return the page of all that was measured."""
    lines = [HEAD.format(**measured)]
    for task in TASKS.values():
        rows, shown, swept, at_once, of_sweep = [], [], [], 1.0, 1
        for variant in task.variants:
            runs = sweep(task, variant)
            of_sweep = min(seeds[task.name], task.sweep_seeds)
            found = best_of(runs, directory, of_sweep)
            if found is None:
                continue
            target, best = found
            curves = {library: seeds_of(run, seeds[task.name], directory) for library, run in best.items()}
            at_once = max(
                [at_once, *(curve[0].get("runs at once", 1.0) for group in curves.values() for curve in group)]
            )
            clock = clock_of(curves["trl"][0])
            peer = [reached(curve, target, clock) for curve in curves["trl"]]
            for library, run in best.items():
                group = curves[library]
                cpu, wall = ([reached(curve, target, which) for curve in group] for which in ("cpu", "wall"))
                first = [touched(curve, target, "cpu") for curve in group]
                shown_ratio = ratio([reached(curve, target, clock) for curve in group], peer)
                shown_ratio = shown_ratio if library == "ours" else ""
                finals = list(map(final, group))
                middle = statistics.median(reached(curve, target, "step") for curve in group)
                steps = f"{middle:g}" if math.isfinite(middle) else "-"
                rows.append(
                    f"| {variant.replace('-', ', ')} | {name_of(run)} | {run.rate:g} | {len(group)} "
                    f"| {target:.2f} | {mean(cpu)} | {shown_ratio} | {mean(wall)} | {steps} | {mean(first)} "
                    f"| {mean(finals, 3)} |"
                )
            swept += [
                f"| {variant.replace('-', ', ')} | {name_of(run)} | {run.rate:g} "
                f"| {mean([reached(points, target, 'cpu') for points in group])} | {mean(list(map(final, group)), 3)} |"
                for run in [run for group in runs.values() for run in group]
                for group in [seeds_of(run, of_sweep, directory)]
            ]
            names = {library: name_of(run) for library, run in best.items()}
            if pictures:
                (pictures / f"learning_{task.name}_{variant}.svg").write_text(drawing(curves, target, names))
            shown.append(f"![Accuracy of {task.name}, {variant}](images/learning_{task.name}_{variant}.svg)")
        if rows:
            if at_once > 1:
                lines += [SECTION[task.name], "", f"{at_once:g} runs were made at a time, one on each core.", ""]
            else:
                lines += [SECTION[task.name], ""]
            lines += [TABLE, *rows, "", f"The sweep, {counted(of_sweep, 'seed')}:", "", SWEEP, *swept, ""]
            lines += [line for picture in shown for line in (picture, "")]
    return "\n".join(lines).rstrip() + "\n"


HEAD = """# Time to accuracy compared with TRL

How long until your model is better than before? Here both libraries train the same model on the same rows, and we
measure the time until 80 % of the best final accuracy that any of them reached. `make benchmark-learning` repeats it
on your machine, and writes this page. With a GPU, rates and ratios go by wall seconds; we have not run it on one.

- The same: model, prompts, rewards, responses and updates per step, AdamW, a constant learning rate without warm-up.
  With GRPO also clip 0.2, no KL, rewards divided by the deviation of their group, LoRA of rank 16 on all linear
  layers. With PPO also the coefficients, the clip of values and a critic that begins at 0.
- Not TRL's defaults: it does not correct the log-probabilities of vLLM (`vllm_importance_sampling_correction`), which
  would take a forward pass that one update per rollout does not need, and which lightning-rlhf does not do either.
  Its vLLM gets the seed of the run. On a CPU it would train in bfloat16. Its SFT pads, because its `padding_free` took
  twice the seconds for these short texts.
- Not lightning-rlhf's default: `keep_groups`, with which responses to a prompt share its forward pass.
- What differs: TRL's PPO does not clip gradients. Its base under LoRA has float32 weights, ours bfloat16 ones in
  bfloat16, with which a step of TRL takes 0.98 times the seconds, but its base is rounded at each push. In float32,
  lightning-rlhf multiplies with oneDNN where that is faster, and TRL with MKL. The [performance page](performance.md)
  has rows with the same products, and the further help that TRL gets there and here.
- The rate of each library is swept over the same values, with all seeds for addition and with seed 1 for SmolLM2. Shown
  is the one with which most seeds reached the target and stayed there until the end, and of these the fastest. The
  final accuracy is the mean of the last three evaluations. A run that touches the target and falls again has not
  reached it; "touched" shows when that was. We chose these rules after a first measurement, in which one seed had
  chosen rates with which others failed, in both libraries.
- One function evaluates both, greedily, on 256 held-out rows, in the dtype of the run, while the clock stands still.
  Seconds are those from the first step on, in units of 0.01 s. Intervals are 95 % of Student's t over the seeds, those
  of ratios in logarithms.
- A ratio above 1 means that lightning-rlhf took longer, a dash that a run of one of the two never reached the target.
  Where the median is one step, the row compares first steps, which have costs that later ones do not have.

Measured on {date}: {machine}, one thread per process.
"""
TABLE = (
    "| weights | library | rate | seeds | target | CPU s to the target | ratio | wall s | steps, median "
    "| touched, CPU s | final accuracy |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
SWEEP = "| weights | library | rate | CPU s to the target | final accuracy |\n|---|---|---|---|---|"
SECTION = {
    "addition": "## Addition: a model of 0.4 M parameters\n\n4 prompts with 8 responses each are a step of one update.",
    "addition-ppo": "## Addition with PPO\n\n32 responses are a step of two updates of actor and critic. TRL 1.12, "
    "the last release with PPO,\ngenerates with transformers.",
    "addition-sft": "## Addition with SFT\n\n32 right answers are a step.",
    "addition-dpo": "## Addition with DPO\n\n32 right answers, each beside one that forgets a carry, are a step.",
    "addition-distillation": "## Addition with distillation\n\nThe teacher is the same model, trained on right "
    "answers. 32 responses of the student are a step, with the reverse KL.",
    "problems": "## Word problems: SmolLM2-135M\n\n8 prompts with 8 responses each are a step of one update.",
    "chainsum": "## reasoning-gym, chain_sum: SmolLM2-135M\n\nSums of two or three numbers, otherwise as above.",
    "backward": "## reasoning-gym, spell_backward: SmolLM2-135M\n\nWords of three or four letters, otherwise as above.",
}


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="*", help="such as full-float32; without it, those of each task")
    parser.add_argument("--seeds", type=int, help="without it, 3 for the word problems and 5 for others")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, which slow each other a little")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "learning")
    parser.add_argument("--write", type=Path, help="file that the page is written to")
    parser.add_argument("--save", type=Path, help="file that all curves are written to")
    parser.add_argument("--restore", type=Path, help="file of --save whose curves need not be measured again")
    options = parser.parse_args()
    directory = options.directory.resolve()
    measured = {"machine": machine(), "date": f"{date.today():%d %B %Y}"}
    if options.restore:
        measured = restore(directory, options.restore)
    seeds = {name: options.seeds or (3 if name == "problems" else 5) for name in TASKS}
    for name in options.tasks:
        prepare(name, directory)
        task: Any = TASKS[name]
        for variant in options.variants or task.variants:
            runs = sweep(task, variant)
            how = (directory, options.threads, options.at_once)
            of_sweep = min(seeds[name], task.sweep_seeds)
            pairs = list(zip(*runs.values(), strict=True))  # the libraries in turns
            for seed in range(1, of_sweep + 1):
                execute_all((run._replace(seed=seed) for pair in pairs for run in pair), *how)
            found = best_of(runs, directory, of_sweep)
            assert found is not None
            others = range(of_sweep + 1, seeds[name] + 1)
            execute_all((run._replace(seed=seed) for seed in others for run in found[1].values()), *how)
    page = report(directory, seeds, options.write.parent / "images" if options.write else None, measured)
    print(page)
    if options.save:
        save(directory, options.save)
    if options.write:
        options.write.write_text(page)


if __name__ == "__main__":
    main()
