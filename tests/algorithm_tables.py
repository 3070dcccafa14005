"""The tables of algorithms in the documentation, generated from the first lines of the files in configs/algorithms.

``python -m tests.algorithm_tables`` writes them. An algorithm that was not measured yet gets a row without results in
configs/README.md; fill it in by hand, the next call keeps it.
"""

import re
from pathlib import Path

import yaml

from lightning_rlhf.cli.merging import merge

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "configs/algorithms/base.yaml"
CONFIGS = [path for path in sorted(BASE.parent.glob("*.yaml")) if path != BASE]
PPO = ROOT / "configs/quickstart/ppo.yaml"
OVERVIEW = ROOT / "docs/algorithms/README.md"
RESULTS = ROOT / "configs/README.md"
OVERVIEW_COLUMNS = "| algorithm | estimator | loss | aggregation | KL | YAML | page |"
RESULTS_COLUMNS = "| run | steps | seed 1 | seed 11 | seconds, each |"


def arguments(path):
    """Return the command line arguments that select a configuration: an algorithm needs base.yaml before it."""
    files = [BASE, path] if path in CONFIGS else [path]
    return [argument for file in files for argument in ("--config", str(file))]


def values(path):
    """Return the values of a configuration; those of an algorithm override base.yaml, as in a run."""
    instance = yaml.safe_load(path.read_text())
    return merge(yaml.safe_load(BASE.read_text()), instance) if path in CONFIGS else instance


def row(path):
    """Return name, estimator, loss, aggregation and KL of an algorithm, from the line "# Table:" of its file."""
    (line,) = re.findall(r"^# Table: (.+)$", path.read_text(), re.MULTILINE)
    cells = line.split(" | ")
    assert len(cells) == 5, path
    return cells


def bounds(path):
    """Return the lowest fractions of correct answers that the run must reach, sampled and greedy."""
    (pair,) = re.findall(r"^# Bounds: (\S+) sampled, (\S+) greedy$", path.read_text(), re.MULTILINE)
    return tuple(float(bound) for bound in pair)


def overview_table():
    lines = [OVERVIEW_COLUMNS, "|---" * 7 + "|"]
    for path in [PPO, *CONFIGS]:
        name = f"{path.parent.name}/{path.name}"
        cells = [*row(path), f"[`{name}`](../../configs/{name})", f"[{path.stem}]({path.stem}.md)"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def results_table(page):
    measured = dict(re.findall(r"^\| \[`(\w+)`\]\(algorithms/.+?\) \| \d+ \| (.+) \|$", page, re.MULTILINE))
    lines = [RESULTS_COLUMNS, "|---" * 5 + "|"]
    for path in CONFIGS:
        steps = values(path)["trainer"]["max_steps"]
        results = measured.get(path.stem, "not run | not run | not run")
        lines.append(f"| [`{path.stem}`](algorithms/{path.name}) | {steps} | {results} |")
    return lines


def with_table(page, columns, table):
    """Return the page with the table that begins with ``columns`` replaced."""
    before, _, rest = page.partition(columns)
    _, _, after = rest.partition("\n\n")
    return before + "\n".join(table) + "\n\n" + after


def pages():
    """Return each generated page with its expected text."""
    overview, results = OVERVIEW.read_text(), RESULTS.read_text()
    return {
        OVERVIEW: with_table(overview, OVERVIEW_COLUMNS, overview_table()),
        RESULTS: with_table(results, RESULTS_COLUMNS, results_table(results)),
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
