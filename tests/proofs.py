"""Check every promise of the README: ``make proofs``, about half an hour on two cores; ``PROOFS=all`` for the rest.

Runs the tests of each promise in a process of their own, and writes docs/proofs.md: the promise, the tests, the figure
that they measured just now, and whether all passed.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/proofs.md"
GOLDEN = "golden or recorded or peer or verl or trl or published"


@dataclass
class Measured:
    """What the tests of a promise found.

    Attributes:
        passed: names of the tests that passed.
        figures: the numbers that they recorded, by name.
    """

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0
    text: str = ""  # what a program that is no test printed last

    def count(self, pattern: str = "") -> int:
        """Return the number of tests that passed and contain a pattern in their name."""
        return sum(bool(re.search(pattern, name)) for name in self.passed)

    def verdict(self) -> str:
        """Return the outcome in words."""
        if self.failed:
            return f"**fails**: {', '.join(f'`{name}`' for name in self.failed)}"
        if not (self.passed or self.text):
            return f"not run: {len(self.skipped)} tests were skipped"
        return f"passes ({len(self.skipped)} skipped)" if self.skipped else "passes"


@dataclass(frozen=True)
class Promise:
    """A promise of the README and its tests.

    Attributes:
        name: heading of its row, to which the README links.
        tests: arguments of pytest.
        more: further tests, of ``PROOFS=all``.
        figure: makes a sentence of what was measured.
    """

    name: str
    text: str
    tests: tuple[str, ...]
    figure: Callable[[Measured], str]
    more: tuple[str, ...] = ()


def largest(name: str, what: str) -> Callable[[Measured], str]:
    """Return a function that describes the largest of the numbers of a name."""
    return lambda measured: f"at most {max(measured.figures[name]):.1e} {what}, in {len(measured.figures[name])} cases"


def formulas(measured: Measured) -> str:
    """Describe tests of the mathematics, and mutants."""
    peers = measured.count(r"of_(verl|trl|peers|stable|tinker)|verls|that_verl|published")
    loops = measured.count(r"loop|definition|formula|equation")
    mutants = re.search(r"all: (\d+) mutants, (\d+) killed .*, (\d+) survivors that are not known", measured.text)
    tried = f"; {mutants[2]} of {mutants[1]} mutants killed, {mutants[3]} unknown survivors" if mutants else ""
    compared = f"{peers} with recorded numbers of peers and {loops} with loops or formulas"
    return f"{len(measured.passed)} tests, {compared}{tried}"


PROMISES = (
    Promise(
        "Losses",
        "Micro-batches and the number of processes never change your loss",
        ("tests/modules/test_update.py", "tests/distributed/test_parity.py"),
        lambda m: (
            f"gradients with any micro-batches differ by {max(m.figures['difference of gradients']):.0e} in float64; "
            "weights of "
            f"{len(m.figures['difference of weights']) // 3} combinations of strategy and processes by less than "
            f"{max(m.figures['difference of weights']):.1e}"
        ),
    ),
    Promise(
        "Resume",
        "Kill a run anywhere and resume it: the same bits, vLLM included",
        (
            "tests/faults/test_damage.py",
            "tests/faults/test_resume.py::test_kills_at_random_points_change_no_result",
            "tests/faults/test_resume.py::test_kills_at_every_kind_of_point_of_one_run_change_no_result[1]",
            "tests/faults/test_resume.py::test_ten_kills_of_a_run_on_vllm_change_no_result[0]",
        ),
        lambda m: (
            f"{sum(m.figures['kills']):.0f} kills; every run had the same bits. "
            f"{m.count('file_and_reason|also_verified')} damaged checkpoints; each was named"
        ),
        ("tests/faults/test_damage.py", "tests/faults/test_resume.py", "tests/faults/test_signals.py"),
    ),
    Promise(
        "Engine deaths",
        "If vLLM dies, the run goes on with the same result",
        ("tests/faults/test_engine_deaths.py", "-k", "20_times and prompts"),
        lambda m: (
            f"{sum(m.figures['kills']):.0f} kills of vLLM in {len(m.figures['kills'])} runs; "
            "every run had the same bits"
        ),
        ("tests/faults/test_engine_deaths.py", "tests/faults/test_server_deaths.py"),
    ),
    Promise(
        "Lost weights",
        "No weight gets lost on its way to vLLM",
        ("tests/rollout/test_lost_weights.py",),
        lambda m: (
            f"{m.count('lost_parameter|outdated|without_loading')} lost weights, halves and copies; each was named"
        ),
    ),
    Promise(
        "Staleness",
        "The engine can generate while the module learns, and a resumed run repeats the same schedule",
        (
            "tests/callbacks/test_staleness.py",
            "tests/faults/test_resume.py::test_kills_at_random_points_of_an_asynchronous_run_change_no_result",
        ),
        lambda m: f"{sum(m.figures['kills']):.0f} kills with `max_staleness` 1 and 2; every run had the same bits",
    ),
    Promise(
        "Formulas",
        "Every formula is checked four ways",
        ("tests/functional", "tests/objectives", "tests/extras/algorithms", "-m", "not slow and not gpu"),
        formulas,
    ),
    Promise(
        "Safe by default",
        "Safetensors only, no code from the hub, no pickle from files; programs of a model run in a sandbox",
        ("tests/test_safety.py", "tests/extras/sandbox"),
        lambda m: f"{m.count('test_attempt_fails')} attempts to escape from the sandbox; none succeeded",
    ),
    Promise(
        "Other strategies",
        "You can resume with another strategy or number of processes",
        ("tests/distributed/test_resharding.py", "-k", "cover"),
        largest("difference of weights", "between weights one step later"),
        ("tests/distributed/test_resharding.py",),
    ),
    Promise(
        "Algorithms",
        "More than thirty algorithms, with a page and a YAML each",
        (
            "tests/modules/test_matrix.py::test_every_estimator_steps_with_one_pair_of_loss_and_aggregation",
            "tests/cli/test_algorithm_configs.py::test_page_agrees_with_the_configuration",
            "tests/cli/test_algorithm_configs.py::test_every_configuration_builds_its_objects",
        ),
        lambda m: (
            f"{m.count('page_agrees')} pages agree with their configuration, {m.count('builds_its_objects')} "
            f"configurations build their objects, {m.count('every_estimator_steps')} estimators took a step"
        ),
        ("tests/modules/test_matrix.py", "tests/cli/test_algorithm_configs.py"),
    ),
    Promise(
        "Architectures",
        "The log-probabilities and gradients are those of the model's own logits",
        ("tests/models/test_architectures.py",),
        largest("error of gradients", "relative error of gradients"),
    ),
    Promise(
        "Conversations",
        "Conversations train on exactly the tokens that were sampled",
        ("tests/environments/test_training.py", "tests/environments/test_conversation.py"),
        lambda m: f"{len(m.passed)} tests",
    ),
    Promise(
        "Quickstart",
        "Correct answers to 512 held-out additions rise from 0.268 to 0.992",
        ("tests/learning/test_quickstart.py", "-k", "not asynchronous"),
        lambda m: f"from {m.figures['before'][0]:.3f} to {m.figures['after'][0]:.3f} (greedy, seed 1)",
        ("tests/learning/test_quickstart.py",),
    ),
    Promise(
        "Your own task",
        "From 0.72 to 0.92 correct answers to 256 held-out questions in a minute",
        ("tests/learning/test_own_task.py",),
        lambda m: f"{m.figures['after'][0]:.3f} after (sampled, seed 1)",
    ),
)


def run_tests(arguments: tuple[str, ...], processes: int) -> Measured:
    """Run pytest and return what it found."""
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report.xml"), Path(folder, "log")
        marks = () if "-m" in arguments else ("-m", "not gpu")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *marks]
        command += ["--numprocesses", str(processes), *arguments]
        begun = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False
            ).returncode
        measured.seconds = time.monotonic() - begun
        if code not in (0, 1) or not report.exists():
            print(log.read_text()[-4000:], file=sys.stderr)
            measured.failed.append(f"pytest ended with {code}")
            return measured
        if code:
            print(log.read_text()[-4000:], file=sys.stderr)
        for case in ET.parse(report).iter("testcase"):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            getattr(measured, outcome).append(name)
            for recorded in case.iter("property"):
                measured.figures[recorded.get("name", "")].append(float(recorded.get("value", "nan")))
    return measured


def run_mutants(measured: Measured, everything: bool) -> None:
    """Try a tenth of the mutants, or all, and add those that survive and are not known."""
    command = [sys.executable, "-m", "tests.mutants", "--every", "1" if everything else "10"]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    measured.seconds += time.monotonic() - begun
    measured.text = done.stdout
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        measured.failed.append("tests.mutants")


def machine() -> str:
    """Return the processor and the number of its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    kind = f"family {values.get('cpu family', '?')}, model {values.get('model', '?')}"
    return f"{os.cpu_count()} cores of {values.get('model name', platform.processor())} ({kind})"


def row(promise: Promise, measured: Measured, tests: tuple[str, ...]) -> str:
    """Return the section of a promise."""
    # A sentence such as "every run had the same bits" is true only if all tests passed.
    figure = (
        promise.figure(measured) if measured.passed and not measured.failed else f"{len(measured.passed)} tests passed"
    )
    files = dict.fromkeys(argument.partition("::")[0] for argument in tests if argument.startswith("tests/"))
    links = ", ".join(f"[{file.removeprefix('tests/')}](../{file})" for file in files)
    name = f'<a id="{anchor(promise.name)}"></a>{promise.name}'
    when = f"{measured.seconds / 60:.1f} min at {commit()}"
    cells = (name, promise.text, figure, measured.verdict(), when, links)
    return f"| {' | '.join(cells)} |"


def commit() -> str:
    """Return the short name of the commit that is tested."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def anchor(name: str) -> str:
    """Return the name of a link to a row."""
    return name.lower().replace(" ", "-")


def main() -> None:
    """Check the promises and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="promises to check, such as losses; all without names")
    parser.add_argument("--all", action="store_true", help="also the tests that take hours")
    parser.add_argument("--processes", type=int, default=2, help="tests at a time")
    parser.add_argument("--page", type=Path, default=PAGE, help="file with the rows")
    options = parser.parse_args()
    known = {anchor(promise.name): promise for promise in PROMISES}
    if unknown := set(options.names) - known.keys():
        raise SystemExit(f"no promise {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    lines, failed, begun = [], False, time.monotonic()
    for name in options.names or known:
        promise = known[name]
        tests = promise.more if options.all and promise.more else promise.tests
        measured = run_tests(tests, options.processes)
        if name == "formulas":
            run_mutants(measured, options.all)
        lines.append(row(promise, measured, tests))
        failed |= bool(measured.failed)
        print(lines[-1], flush=True)
    if options.names and options.page.exists():
        old = options.page.read_text().splitlines()
        new = {line.split('"')[1]: line for line in lines}
        lines = [new.get(line.split('"')[1], line) if line.startswith('| <a id="') else line for line in old]
        options.page.write_text("\n".join(lines) + "\n")
    elif not options.names:
        minutes = (time.monotonic() - begun) / 60
        command = "make proofs PROOFS=all" if options.all else "make proofs"
        head = HEAD.format(machine=machine(), minutes=minutes, date=f"{date.today():%d %B %Y}", command=command)
        options.page.write_text(head + "\n".join(lines) + "\n")
    sys.exit(failed)


HEAD = """# Proofs: every promise, checked by one command

Do not believe us: `make proofs` checks each promise of the README on your machine and writes this page again, in about
half an hour on two cores. `make proofs PROOFS=all` also runs the tests that take hours, and
`python -m tests.proofs losses` checks one promise and writes its row again. [What was tested, and how](tested.md) lists
many more.

This page comes from `{command}` on {date}: {machine}, {minutes:.0f} minutes. No GPU.

| promise | in words | figure, just measured | outcome | time | tests |
|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    main()
