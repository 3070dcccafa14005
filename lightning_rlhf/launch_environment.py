"""The environment variables that matter, in one table: who reads each, when it is set, and why.

Nothing here imports the libraries that read them, and a value that is there already always wins.
``lightning-rlhf doctor`` shows the table as it applies to the machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

OURS = "LIGHTNING_RLHF_SET"  # names that were set here, so that child processes can tell them from their user's
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")  # of variables that launchers set for ranks
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # NVIDIA, AMD, Windows' GPUs under WSL


@dataclass(frozen=True)
class Machine:
    """What the rules ask of the machine.

    Args:
        has_gpu: whether this process may use one.
        cores: that this process may run on, at least 1.
        processes: of this run on this machine, at least 1; None where nobody has said so yet.
        engine_dtype: dtype of the rollout engine's weights; empty where it is not known.
    """

    has_gpu: bool
    cores: int
    processes: int | None
    engine_dtype: str = ""

    @classmethod
    def here(cls, environ: Mapping[str, str], processes: int | None = None, devices: Path = Path("/dev")) -> Machine:
        """This machine.

        Args:
            environ: its variables; torchrun and SLURM say in them how many processes there are.
            processes: on this machine, where it is known better.
            devices: the folder of device files.
        """
        hidden = environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
        has_gpu = not hidden and any(path for pattern in _DEVICE_FILES for path in devices.glob(pattern))
        told = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_NTASKS_PER_NODE") or ""
        return cls(has_gpu, _cores(), processes or (int(told) if told.isdecimal() else None))


@dataclass(frozen=True)
class Variable:
    """One row.

    Args:
        name: of the variable.
        reader: the library that reads it.
        process: ``all`` that take part in a run, or the rollout ``engine`` alone.
        condition: when it is set, in words.
        value: the value for a machine; None where it does not apply.
        reason: in one sentence.
        read_by: module whose import reads the variable; setting it later is of no use. Empty where it is read at use.
        required: an engine does not work with another value, so that its process gets this one whatever is set.
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


def _with_gpu_in_float32(value: str) -> Callable[[Machine], str | None]:
    return lambda machine: value if machine.has_gpu and machine.engine_dtype == "float32" else None


def _threads(machine: Machine) -> str | None:
    shared = machine.processes is not None and machine.processes > 1
    return str(max(1, machine.cores // machine.processes)) if shared and machine.processes else None


def _processes(machine: Machine) -> str | None:
    return None if machine.has_gpu or machine.processes is None else str(machine.processes)


VARIABLES = (
    Variable(
        "NCCL_DEBUG", "NCCL", "all", "with a GPU", _with_gpu("WARN"),
        "By default NCCL keeps what went wrong to itself, and all that is seen is a run that waits.",
    ),
    Variable(
        "TOKENIZERS_PARALLELISM", "tokenizers", "all", "always", _always("false"),
        "Rows are tokenised one by one, so its threads bring nothing; but with them, processes forked for loading data "
        "or grading can lock up.",
    ),
    Variable(
        "OMP_NUM_THREADS", "OpenMP", "all", "several processes on the machine, known from torchrun or SLURM", _threads,
        "Each process would otherwise start a thread for every core, and they would take turns.", "torch",
    ),
    Variable(
        "DS_ACCELERATOR", "DeepSpeed", "all", "without a GPU", _without_gpu("cpu"),
        "DeepSpeed otherwise looks for the packages of eight makers of accelerators and warns that it found none.",
        "deepspeed",
    ),
    Variable(
        "LOCAL_SIZE", "DeepSpeed", "all", "without a GPU, once the number of processes is known", _processes,
        "DeepSpeed otherwise takes the machine's NUMA nodes for its devices.",
    ),
    Variable(
        "VLLM_NO_USAGE_STATS", "vLLM", "all", "always", _always("1"),
        "Otherwise vLLM reports model and hardware to its makers.",
    ),
    Variable(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "vLLM", "engine", "always", _always("0"),
        "The engine has a process of its own already, and is driven step by step within it.", required=True,
    ),
    Variable(
        "VLLM_LOGGING_LEVEL", "vLLM", "engine", "always", _always("ERROR"),
        "The engine's log is shown when it dies, and what killed it should be at its end.",
    ),
    Variable(
        "TRITON_F32_DEFAULT", "Triton", "engine", "with a GPU, for an engine in float32", _with_gpu_in_float32("ieee"),
        "Attention of vLLM in float32 otherwise rounds its operands to TF32, 10 bits, and log-probabilities differ by "
        "about 0.01 nats from the actor's.", "triton",
    ),
    Variable(
        "TORCH_COMPILE_DISABLE", "torch", "engine", "without a GPU", _without_gpu("1"),
        "Without a GPU the model runs uncompiled; its samplers would still be compiled, for a quarter of a minute.",
        "torch",
    ),
    Variable(
        "VLLM_CPU_OMP_THREADS_BIND", "vLLM", "engine", "without a GPU", _without_gpu("nobind"),
        "Every engine of the machine would otherwise be bound to the same cores.",
    ),
)  # fmt: skip

# Set by other frameworks, and why not here.
LEFT_ALONE = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 is for Megatron's tensor parallelism; FSDP and torch's own need several queues "
    "to compute and communicate at once (pytorch/torchtitan#1147)",
    "NCCL_CUMEM_ENABLE": "0 worked around a fault that NCCL 2.22.3 mended; vLLM no longer sets it (vllm#24141)",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "torch does so by default and warns of the variable (pytorch/torchtitan#1088)",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch's default ends a process whose collective failed or timed out already",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True helps where memory is fragmented, but vLLM's all-reduce can "
    "fail with it (vllm#42609), and tensors shared between processes open slower",
    "NCCL_SOCKET_IFNAME": "only you know which network joins your machines",
    "GLOO_SOCKET_IFNAME": "only you know which network joins your machines",
}


def apply(processes: int | None = None) -> dict[str, str]:
    """Set what applies to all processes and is not set yet.

    Args:
        processes: of this run on this machine; None takes torchrun's or SLURM's word for it.

    Returns:
        What was set.
    """
    machine = Machine.here(os.environ, processes)
    found = {}
    for variable in VARIABLES:
        value = variable.value(machine)
        late = variable.read_by in sys.modules
        if variable.process == "all" and value is not None and not late and variable.name not in os.environ:
            found[variable.name] = value
    os.environ.update(found)
    if found:
        os.environ[OURS] = ",".join([*_set_here(os.environ), *found])
    return found


def engine_environment(
    environ: Mapping[str, str], has_gpu: bool | None = None, engine_dtype: str = ""
) -> dict[str, str]:
    """What a rollout engine's process is given beside what it inherits.

    Args:
        environ: what it inherits; its values win, but for those that the engine does not work with.
        has_gpu: whether the engine uses one; None looks for one.
        engine_dtype: dtype of the engine's weights; empty where it is not known.
    """
    machine = replace(Machine.here(environ), engine_dtype=engine_dtype)
    machine = machine if has_gpu is None else replace(machine, has_gpu=has_gpu)
    values = {v.name: v.value(machine) for v in VARIABLES if v.required or v.name not in environ}
    return {name: value for name, value in values.items() if value is not None}


def origin(variable: Variable, environ: Mapping[str, str], machine: Machine) -> tuple[str, str]:
    """The value of a row and who set it.

    Args:
        variable: the row.
        environ: of a process that called :func:`apply`.
        machine: where it runs.

    Returns:
        Value, empty where there is none; ``us``, ``you`` or ``not applicable``.
    """
    if variable.name in environ:
        return environ[variable.name], "us" if variable.name in _set_here(environ) else "you"
    value = variable.value(machine) if variable.process == "engine" else None
    return (value, "us") if value is not None else ("", "not applicable")


def _set_here(environ: Mapping[str, str]) -> list[str]:
    return [name for name in environ.get(OURS, "").split(",") if name]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
