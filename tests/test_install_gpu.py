"""``constraints/install.sh`` rejects a machine whose GPU the locked packages do not support before it installs
anything; ``make test-gpu`` runs everything that it names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What the script prints once it has accepted the machine: the interpreter of these tests cannot make an environment.
STARTS = "-m venv' failed"


@pytest.fixture
def machine(tmp_path):
    """A function that runs the installation in a copy of the tree."""
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

    def machine(smi, compiler=True, headers=True, devices=(), module=None, smi_works=True, device=None):
        """Run it on a machine with these programs and devices; return the last line on stderr.

        ``smi`` is what nvidia-smi prints, "driver, compute capability" for each GPU; None: there is no such program.
        """
        if smi is not None:
            if smi_works:
                program("nvidia-smi", f'case "$1" in -L) ;; *) echo "{smi}" ;; esac')
            else:  # its driver is missing
                program("nvidia-smi", f'echo "{smi}"\nexit 9')
        (tmp_path / "dev").mkdir()
        for name in devices:
            (tmp_path / "dev" / name).touch()
        if module is not None:
            (tmp_path / "module").write_text(f"{module}\n")
        redirected = {
            "/dev/nvidia[": f"{tmp_path}/dev/nvidia[",
            "/dev/kfd": f"{tmp_path}/dev/kfd",
            "/sys/module/nvidia/version": f"{tmp_path}/module",
        }
        script = tmp_path / "constraints/install.sh"
        text = script.read_text()
        for path, copy in redirected.items():
            text = text.replace(path, copy)
        script.write_text(text)
        if compiler:
            program("gcc", "")
        # The interpreter: the version, where its headers are, and no environment, where an installation would begin.
        include = tmp_path / "include"
        include.mkdir()
        if headers:
            (include / "Python.h").touch()
        version = sys.version.split()[0]
        program(
            "python",
            f"""
            case "$2" in
                *sysconfig*) echo {include} ;;
                *platform*) echo {version} ;;
                *) exit 1 ;;
            esac""",
        )
        environment = {"PATH": str(programs), "PYTHON": "python", "HOME": os.environ.get("HOME", "/")}
        done = subprocess.run(
            ["bash", str(tmp_path / "constraints/install.sh")],
            env=environment | ({"DEVICE": device} if device else {}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert "integer expression" not in done.stderr  # bash, where a version is compared that is no number
        machine.output = done.stdout + done.stderr
        return done.stderr.strip().splitlines()[-1]

    return machine


@pytest.mark.parametrize(("doctor", "tests", "code"), [(0, 0, 0), (1, 0, 2), (0, 1, 2), (1, 1, 2)])
def test_make_test_gpu_runs_the_tests_even_if_doctor_finds_problems(tmp_path, doctor, tests, code):
    for name, status in (("lightning-rlhf", doctor), ("python", tests)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    command = ["make", "--no-print-directory", "--assume-old=install", "test-gpu", f"BIN={tmp_path}", "ARGS=-x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[:2] == ["lightning-rlhf doctor --try", "python -m pytest -m gpu tests/gpu -x"]
    assert done.returncode == code


def test_complete_machine_starts_the_installation(machine):
    assert STARTS in machine("580.95.05, 9.0")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("570.133.20, 9.0", "needs NVIDIA driver 580 or newer, and this machine has 570.133.20"),
        ("590.1, 7.0", "needs GPUs of compute capability 7.5 (Turing) or newer, and this one has 7.0"),
    ],
)
def test_old_driver_or_gpu_is_rejected(machine, answer, message):
    assert message in machine(answer)


def test_missing_compiler_is_rejected(machine):
    assert "a C compiler is missing" in machine("580.95.05, 9.0", compiler=False)


def test_missing_headers_are_rejected(machine):
    assert "Python.h is missing" in machine("580.95.05, 9.0", headers=False)


@pytest.mark.parametrize("answer", ["580.95.05, [N/A]", "580.95.05, 9.0\n580.95.05, [N/A]"])
def test_gpu_without_a_known_capability_starts_the_installation(machine, answer):
    assert STARTS in machine(answer)
    assert "constraints/gpu.lock" in machine.output


def test_next_lock_is_installed_when_it_is_named(machine):
    assert STARTS in machine("580.95.05, 9.0", device="gpu-next")
    assert "constraints/gpu-next.lock" in machine.output


def test_next_lock_needs_the_same_driver(machine):
    assert "needs NVIDIA driver 580 or newer" in machine("570.133.20, 9.0", device="gpu-next")


def test_unknown_device_names_the_known_ones(machine):
    assert "DEVICE is cpu, gpu or gpu-next, not 'tpu'" in machine(None, device="tpu")


def test_old_gpu_after_one_without_a_known_capability_is_rejected(machine):
    assert "this one has 7.0" in machine("580.95.05, [N/A]\n580.95.05, 7.0")


def test_driver_that_does_not_answer_is_rejected(machine):
    answer = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    last = machine(answer, devices=["nvidia0"], smi_works=False)
    assert "nvidia-smi reports no driver ('NVIDIA-SMI has failed" in last
    assert "make DEVICE=cpu" in last


@pytest.mark.parametrize("module", ["580.95.05", None])
def test_gpu_without_nvidia_smi_is_found_by_its_device_file(machine, module):
    assert STARTS in machine(None, devices=["nvidia0", "nvidiactl"], module=module)
    assert "constraints/gpu.lock" in machine.output


def test_old_driver_without_nvidia_smi_is_rejected(machine):
    assert "this machine has 570.1" in machine(None, devices=["nvidia0", "nvidiactl"], module="570.1")


def test_gpu_in_mig_mode_starts_the_installation(machine):
    assert STARTS in machine("580.95.05, 9.0", devices=["nvidia0", "nvidia-caps"])


@pytest.mark.parametrize(("devices", "noted"), [(["kfd"], True), ([], False)])
def test_machine_without_an_nvidia_gpu_installs_for_the_cpu(machine, devices, noted):
    assert STARTS in machine(None, devices=devices)
    assert "constraints/cpu.lock" in machine.output
    assert ("ROCm is not supported" in machine.output) == noted
