"""``constraints/install.sh`` refuses a machine with a GPU that the locked packages cannot use, before it installs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def machine(tmp_path):
    """Installs into a copy of the tree, on a machine with the given programs; returns the last line on stderr."""
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "env", "cat", "cut", "dirname", "flock", "rm", "sed", "sha256sum", "tr", "uname"):
        (programs / name).symlink_to(shutil.which(name))

    def program(name, text):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)

    def machine(answer, compiler=True, headers=True):
        program("nvidia-smi", f'[ "$1" = -L ] || echo "{answer}"')
        if compiler:
            program("gcc", "")
        # The interpreter: the version, where its headers are, and no environment, where an installation would begin.
        include = tmp_path / "include"
        include.mkdir()
        if headers:
            (include / "Python.h").touch()
        program(
            "python",
            f'case "$2" in *sysconfig*) echo {include};; *platform*) echo {sys.version.split()[0]};; *) exit 1;; esac',
        )
        environment = {"PATH": str(programs), "PYTHON": "python", "HOME": os.environ.get("HOME", "/")}
        done = subprocess.run(
            ["bash", str(tmp_path / "constraints/install.sh")], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 1
        return done.stderr.strip().splitlines()[-1]

    return machine


@pytest.mark.parametrize(("doctor", "tests", "code"), [(0, 0, 0), (1, 0, 2), (0, 1, 2), (1, 1, 2)])
def test_the_tests_on_a_gpu_run_even_if_doctor_finds_faults(tmp_path, doctor, tests, code):
    for name, status in (("lightning-rlhf", doctor), ("python", tests)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    command = ["make", "--no-print-directory", "--assume-old=install", "test-gpu", f"BIN={tmp_path}", "ARGS=-x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[:2] == ["lightning-rlhf doctor --try", "python -m pytest -m gpu tests/gpu -x"]
    assert done.returncode == code


def test_a_machine_that_has_everything_begins_to_install(machine):
    assert "-m venv' failed" in machine("580.95.05, 9.0")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("570.133.20, 9.0", "needs NVIDIA driver 580 or newer, and this machine has 570.133.20"),
        ("590.1, 7.0", "needs GPUs of compute capability 7.5 (Turing) or newer, and this one has 7.0"),
    ],
)
def test_an_old_driver_or_gpu_is_refused(machine, answer, told):
    assert told in machine(answer)


def test_a_missing_compiler_is_refused(machine):
    assert "a C compiler is missing" in machine("580.95.05, 9.0", compiler=False)


def test_missing_headers_are_refused(machine):
    assert "Python.h is missing" in machine("580.95.05, 9.0", headers=False)
