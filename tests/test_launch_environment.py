"""The table of environment variables: they are set in the right processes, early enough, and keep the user's values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf import launch_environment
from lightning_rlhf.launch_environment import NOT_SET, OURS, VARIABLES, Machine, apply, engine_environment, origin

ROOT = Path(__file__).resolve().parents[1]
BY_NAME = {variable.name: variable for variable in VARIABLES}
LAPTOP = Machine(has_gpu=False, cores=8, processes=None)
BOX = Machine(has_gpu=True, cores=96, processes=8)


@pytest.fixture
def bare(monkeypatch):
    """An environment without the variables of the table and without the libraries that read one when imported."""
    for name in [*BY_NAME, OURS, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch_environment, "sys", type("Sys", (), {"modules": {}}))


def machine(monkeypatch, **fields):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *_: Machine(**fields)))


def test_variables_without_a_gpu(bare, monkeypatch):
    machine(monkeypatch, has_gpu=False, cores=8, processes=4)
    expected = {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "2",
        "DS_ACCELERATOR": "cpu",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "LOCAL_SIZE": "4",
        "VLLM_NO_USAGE_STATS": "1",
    }
    assert apply() == expected
    assert expected.items() <= os.environ.items()
    assert apply() == {}


def test_variables_with_gpus(bare, monkeypatch):
    machine(monkeypatch, has_gpu=True, cores=96, processes=8)
    assert apply() == {
        "NCCL_DEBUG": "WARN",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "12",
        "VLLM_NO_USAGE_STATS": "1",
    }


def test_variables_that_depend_on_the_number_of_processes_are_set_once_it_is_known(bare, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not {"LOCAL_SIZE", "OMP_NUM_THREADS"} & apply().keys()
    assert apply(processes=3)["LOCAL_SIZE"] == "3"


@pytest.mark.parametrize("name", [v.name for v in VARIABLES if v.process == "all"])
def test_user_value_is_kept(bare, monkeypatch, name):
    machine(monkeypatch, has_gpu=name == "NCCL_DEBUG", cores=8, processes=4)
    monkeypatch.setenv(name, "mine")
    assert name not in apply()
    assert os.environ[name] == "mine"
    assert origin(BY_NAME[name], os.environ, BOX) == ("mine", "you")


def test_empty_value_counts_as_set(bare, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")
    assert "TOKENIZERS_PARALLELISM" not in apply()


def test_variables_of_an_already_imported_library_are_not_set(bare, monkeypatch):
    machine(monkeypatch, has_gpu=False, cores=8, processes=4)
    launch_environment.sys.modules |= {"torch": None, "deepspeed": None}
    assert not {"OMP_NUM_THREADS", "DS_ACCELERATOR"} & apply().keys()


def test_one_process_uses_all_cores(bare, monkeypatch):
    machine(monkeypatch, has_gpu=False, cores=8, processes=1)
    assert "OMP_NUM_THREADS" not in apply()


def test_more_processes_than_cores_use_one_thread_each(bare, monkeypatch):
    machine(monkeypatch, has_gpu=False, cores=2, processes=4)
    assert apply()["OMP_NUM_THREADS"] == "1"


def test_child_processes_know_which_variables_were_set_automatically(bare, monkeypatch):
    machine(monkeypatch, has_gpu=False, cores=8, processes=None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    apply()
    inherited = dict(os.environ)
    assert origin(BY_NAME["TOKENIZERS_PARALLELISM"], inherited, LAPTOP) == ("false", "us")
    assert origin(BY_NAME["DS_ACCELERATOR"], inherited, LAPTOP) == ("cpu", "you")
    assert origin(BY_NAME["NCCL_DEBUG"], inherited, LAPTOP) == ("", "not applicable")


def test_engine_has_separate_variables(bare):
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    instance = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    shared = {"TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    shared |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    assert engine_environment(hidden) == instance | shared
    assert engine_environment(hidden | shared) == instance
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(hidden, has_gpu=True)
    ieee = [
        engine_environment({}, has_gpu=gpu, engine_dtype=dtype).get("TRITON_F32_DEFAULT")
        for gpu, dtype in ((True, "float32"), (True, "bfloat16"), (True, ""), (False, "float32"))
    ]
    assert ieee == ["ieee", None, None, None]
    assert origin(BY_NAME["VLLM_LOGGING_LEVEL"], hidden, LAPTOP) == ("INFO", "us")
    assert origin(BY_NAME["TORCH_COMPILE_DISABLE"], {}, BOX) == ("", "not applicable")


def test_user_value_reaches_the_engine_unless_it_would_break_it():
    inputs = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    result = engine_environment(inputs)
    assert "VLLM_LOGGING_LEVEL" not in result
    assert result["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize(("files", "has_gpu"), [((), False), (("nvidia0",), True), (("kfd",), False), (("dxg",), True)])
def test_gpus_are_detected_without_torch(tmp_path, files, has_gpu):
    for name in ("null", "nvidiactl", *files):
        (tmp_path / name).touch()
    assert Machine.here({}, devices=tmp_path).has_gpu == has_gpu
    assert not Machine.here({"CUDA_VISIBLE_DEVICES": "-1"}, devices=tmp_path).has_gpu
    assert not Machine.here({"CUDA_VISIBLE_DEVICES": ""}, devices=tmp_path).has_gpu
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "0"}, devices=tmp_path).has_gpu == has_gpu


@pytest.mark.parametrize(
    ("environ", "inputs", "processes"),
    [
        ({}, None, None),
        ({"LOCAL_WORLD_SIZE": "4"}, None, 4),
        ({"SLURM_NTASKS_PER_NODE": "8"}, None, 8),
        ({"SLURM_NTASKS_PER_NODE": "2(x3),1"}, None, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 2, 2),
    ],
)
def test_number_of_processes_is_read_from_the_launcher(environ, inputs, processes):
    assert Machine.here(environ, inputs).processes == processes


def test_command_line_sets_variables_before_any_import():
    code = """
import sys
from lightning_rlhf import launch_environment
heavy = {"torch", "tokenizers", "transformers", "deepspeed", "vllm", "numpy"}
def seen(*arguments):
    print(sorted(heavy & sys.modules.keys()))
    sys.exit(7)
launch_environment.apply = seen
sys.argv = ["lightning-rlhf", "fit", "--help-all"]
from lightning_rlhf.__main__ import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (7, "[]"), done.stderr


def test_every_variable_has_a_one_line_reason():
    for variable in VARIABLES:
        assert variable.reason.endswith(".")
        assert variable.reason[0].isupper()
        assert ". " not in variable.reason
        assert variable.reader
        assert variable.condition
    assert len(BY_NAME) == len(VARIABLES)
    assert not BY_NAME.keys() & NOT_SET.keys()
