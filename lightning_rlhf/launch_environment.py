"""Table of the environment variables that a run sets, with the library that reads each, its condition and reason.

This module does not import these libraries. Values that are already set are not overwritten, except those that an
engine requires. ``lightning-rlhf doctor`` shows the table for the machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

OURS = "LIGHTNING_RLHF_SET"  # variable that lists the names set here, to distinguish them from the user's
_DEVICE_FILES = ("nvidia[0-9]*", "dxg")  # NVIDIA, WSL; AMD's kfd is not supported


@dataclass(frozen=True)
class Machine:
    """Properties of the machine that determine the variables.

    Args:
        has_gpu: whether this process may use a GPU.
        cores: number of cores that this process may run on, at least 1.
        processes: number of processes of this run on this machine, at least 1; None if unknown.
        engine_dtype: dtype of the rollout engine's weights; empty if unknown.
    """

    has_gpu: bool
    cores: int
    processes: int | None
    engine_dtype: str = ""

    @classmethod
    def here(cls, environ: Mapping[str, str], processes: int | None = None, devices: Path = Path("/dev")) -> Machine:
        """Detect the properties of this machine.

        Args:
            environ: environment variables, among them the number of processes of torchrun and SLURM.
            processes: number of processes on this machine; None reads it from ``environ``.
            devices: directory of device files.
        """
        hidden = environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
        has_gpu = not hidden and any(path for pattern in _DEVICE_FILES for path in devices.glob(pattern))
        launched = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_NTASKS_PER_NODE") or ""
        return cls(has_gpu, _cores(), processes or (int(launched) if launched.isdecimal() else None))


@dataclass(frozen=True)
class Variable:
    """One variable of the table.

    Args:
        name: name of the variable.
        reader: library that reads it.
        process: ``all`` processes of a run, or only the rollout ``engine``.
        condition: condition under which it is set, in words.
        value: function that returns the value for a machine; None if the variable does not apply.
        reason: explanation that ``doctor`` prints.
        read_by: module that reads the variable when it is imported, so that it must be set before; empty if the
            variable is read later.
        required: whether an engine needs this value, which then overwrites one that is already set.
    """

    name: str
    reader: str
    process: Literal["all", "engine"]
    condition: str
    value: Callable[[Machine], str | None]
    reason: str
    read_by: str = ""
    required: bool = False


def _always(value: str) -> Callable[[Machine], str]:
    return lambda machine: value


def _with_gpu(value: str) -> Callable[[Machine], str | None]:
    return lambda machine: value if machine.has_gpu else None


def _without_gpu(value: str) -> Callable[[Machine], str | None]:
    return lambda machine: None if machine.has_gpu else value


def _threads(machine: Machine) -> str | None:
    processes = machine.processes or 1
    return str(max(1, machine.cores // processes)) if processes > 1 else None


def _processes(machine: Machine) -> str | None:
    return None if machine.has_gpu or machine.processes is None else str(machine.processes)


VARIABLES = (
    Variable(
        name="NCCL_DEBUG",
        reader="NCCL",
        process="all",
        condition="with a GPU",
        value=_with_gpu("WARN"),
        reason="By default NCCL does not report errors, and a failed run only appears to hang.",
    ),
    Variable(
        name="TOKENIZERS_PARALLELISM",
        reader="tokenizers",
        process="all",
        condition="always",
        value=_always("false"),
        reason="Rows are tokenised one by one, so its threads do not help; with them, processes forked for data "
        "loading or rewards can deadlock.",
    ),
    Variable(
        name="OMP_NUM_THREADS",
        reader="OpenMP",
        process="all",
        condition="where torchrun or SLURM starts several processes on a machine",
        value=_threads,
        reason="Otherwise each process starts a thread for every core, and they compete for the cores.",
        read_by="torch",
    ),
    Variable(
        name="ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        reader="oneDNN",
        process="all",
        condition="without a GPU",
        value=_without_gpu("64"),
        reason="Packed rows have many lengths, and oneDNN would keep the code of 1,024 products: 350 MB in a PPO run.",
        read_by="torch",
    ),
    Variable(
        name="DS_ACCELERATOR",
        reader="DeepSpeed",
        process="all",
        condition="without a GPU",
        value=_without_gpu("cpu"),
        reason="Otherwise DeepSpeed looks for packages of eight accelerator vendors and warns that all are absent.",
        read_by="deepspeed",
    ),
    Variable(
        name="LOCAL_SIZE",
        reader="DeepSpeed",
        process="all",
        condition="without a GPU, once the number of processes is known",
        value=_processes,
        reason="Otherwise DeepSpeed uses the number of NUMA nodes as the number of devices.",
    ),
    Variable(
        name="VLLM_NO_USAGE_STATS",
        reader="vLLM",
        process="all",
        condition="always",
        value=_always("1"),
        reason="Otherwise vLLM sends statistics about model and hardware to its developers.",
    ),
    Variable(
        name="VLLM_ENABLE_V1_MULTIPROCESSING",
        reader="vLLM",
        process="engine",
        condition="always",
        value=_always("0"),
        reason="The engine already has a separate process, which runs it step by step.",
        required=True,
    ),
    Variable(
        name="VLLM_LOGGING_LEVEL",
        reader="vLLM",
        process="engine",
        condition="always",
        value=_always("INFO"),
        reason="A start that takes long or hangs shows in the engine's log how far it is.",
    ),
    Variable(
        name="VLLM_USE_FLASHINFER_SAMPLER",
        reader="vLLM",
        process="engine",
        condition="with a GPU",
        value=lambda machine: "0" if machine.has_gpu else None,
        reason="Log-probabilities need vLLM's own sampler, and FlashInfer's would compile with a CUDA toolkit.",
    ),
    Variable(
        name="TRITON_F32_DEFAULT",
        reader="Triton",
        process="engine",
        condition="with a GPU, for an engine in float32",
        value=lambda machine: "ieee" if machine.has_gpu and machine.engine_dtype == "float32" else None,
        reason="Otherwise vLLM's attention in float32 rounds its operands to TF32, 10 bits, and log-probabilities "
        "differ by about 0.01 nats from the actor's.",
        read_by="triton",
    ),
    Variable(
        name="TORCH_COMPILE_DISABLE",
        reader="torch",
        process="engine",
        condition="without a GPU",
        value=_without_gpu("1"),
        reason="Without a GPU the model runs uncompiled; its samplers would still be compiled, which takes 15 seconds.",
        read_by="torch",
    ),
    Variable(
        name="VLLM_CPU_OMP_THREADS_BIND",
        reader="vLLM",
        process="engine",
        condition="without a GPU",
        value=_without_gpu("nobind"),
        reason="Otherwise all engines of the machine are bound to the same cores.",
    ),
)

# Variables that other frameworks set, with the reason why this one does not.
NOT_SET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 is for Megatron's tensor parallelism; FSDP and torch's need several queues "
    "to overlap computation and communication (pytorch/torchtitan#1147)",
    "NCCL_CUMEM_ENABLE": "0 was a workaround for a bug that NCCL 2.22.3 fixed; vLLM no longer sets it (vllm#24141)",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "already the default of torch, which warns if it is set "
    "(pytorch/torchtitan#1088)",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch's default already ends a process whose collective failed or timed out",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True helps where memory is fragmented, but vLLM's all-reduce can "
    "fail with it (vllm#42609), and tensors shared between processes open slower",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 computes float32 matrix products on a GPU with 10 bits (TF32): faster, and "
    "about 0.001 of the values away from float32",
    "NCCL_SOCKET_IFNAME": "it depends on the network between your machines",
    "GLOO_SOCKET_IFNAME": "it depends on the network between your machines",
}


def apply(processes: int | None = None) -> dict[str, str]:
    """Set the variables that apply to all processes and are not set yet.

    Args:
        processes: number of processes of this run on this machine; None reads it from torchrun's or SLURM's variables.

    Returns:
        The variables that were set.
    """
    machine = Machine.here(os.environ, processes)
    applied = {}
    for variable in VARIABLES:
        value = variable.value(machine)
        late = variable.read_by in sys.modules
        if variable.process == "all" and value is not None and not late and variable.name not in os.environ:
            applied[variable.name] = value
    os.environ.update(applied)
    if applied:
        os.environ[OURS] = ",".join([*_set_by_us(os.environ), *applied])
    return applied


def engine_environment(
    environ: Mapping[str, str], has_gpu: bool | None = None, engine_dtype: str = ""
) -> dict[str, str]:
    """Return the variables to add to the environment of a rollout engine's process.

    Args:
        environ: inherited environment, whose values are kept unless the engine requires others.
        has_gpu: whether the engine uses a GPU; None detects one.
        engine_dtype: dtype of the engine's weights; empty if unknown.
    """
    machine = replace(Machine.here(environ), engine_dtype=engine_dtype)
    machine = machine if has_gpu is None else replace(machine, has_gpu=has_gpu)
    values = {v.name: v.value(machine) for v in VARIABLES if v.required or v.name not in environ}
    return {name: value for name, value in values.items() if value is not None}


def origin(variable: Variable, environ: Mapping[str, str], machine: Machine) -> tuple[str, str]:
    """Return the value of a variable and its origin.

    Args:
        variable: variable of the table.
        environ: environment of a process that called :func:`apply`.
        machine: properties of the machine of that process.

    Returns:
        The value, empty if not set; and its origin: ``us``, ``you`` or ``not applicable``.
    """
    if variable.name in environ:
        return environ[variable.name], "us" if variable.name in _set_by_us(environ) else "you"
    value = variable.value(machine) if variable.process == "engine" else None
    return (value, "us") if value is not None else ("", "not applicable")


def _set_by_us(environ: Mapping[str, str]) -> list[str]:
    return [name for name in environ.get(OURS, "").split(",") if name]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_first_process() -> bool:
    """Return whether this is the first process of the run on this machine."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"
