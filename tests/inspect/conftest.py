import csv
import json

import pytest
import yaml

from tests.inspect.browser import CHROMIUM


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from tests.inspect.browser import Browser

    made = Browser()
    yield made
    made.close()


@pytest.fixture
def run_directory(tmp_path):
    """Writes the directory of a run with these rows of metrics, responses by step, and configuration."""

    def write(name, rows, rollouts=None, config=None, environment=None):
        folder = tmp_path / name
        (folder / "rollouts").mkdir(parents=True)
        columns = list(dict.fromkeys(["step", *(column for row in rows for column in row)]))
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        for step, responses in (rollouts or {}).items():
            lines = "".join(json.dumps(row) + "\n" for row in responses)
            (folder / f"rollouts/step-{step:06d}.jsonl").write_text(lines)
        (folder / "config.yaml").write_text(yaml.safe_dump(config or {}))
        (folder / "env.json").write_text(json.dumps(environment or {}))
        return folder

    return write
