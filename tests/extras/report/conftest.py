import csv
import json
import threading

import pytest
import yaml

from lightning_rlhf.extras.report.inspector.server import InspectServer
from lightning_rlhf.extras.report.page import _SCRIPTS, html_page
from lightning_rlhf.extras.report.run_directory import RunDirectory
from tests.callbacks.conftest import run

__all__ = ["run"]


@pytest.fixture
def run_directory(tmp_path):
    """Write the directory of a run with these rows of metrics, responses by step, and configuration."""

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


@pytest.fixture
def serve():
    """Start the inspector for some directories."""
    servers = []

    def serve(*folders):
        server = InspectServer([RunDirectory(folder) for folder in folders])
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def inspect_page(browser, serve):
    """Open the inspector of some directories."""
    before = browser.allowed

    def page(*folders, **options):
        server = serve(*folders)
        browser.allowed = (*before, server.url)
        browser.open(server.url, **options)
        browser.wait("document.querySelector('#list .muted') !== null")
        return browser

    yield page
    browser.leave()  # before its server ends
    browser.allowed = before


@pytest.fixture
def show(browser, tmp_path):
    """Open a page with the given data, built like the report page."""

    def show(data, scripts=_SCRIPTS, fragment="", **options):
        path = tmp_path / "shown.html"
        path.write_text(html_page(data, scripts, False), encoding="utf-8")
        browser.open(path.as_uri() + fragment, **options)
        return browser

    return show
