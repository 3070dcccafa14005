"""On GPUs: separate engines, one engine on two GPUs, a server with shared memory and NCCL, and the memory of a push."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.extras.servers.push import chunks
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rollout.engine import EngineSetup, visible_gpu
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.rollout.vllm.sync import WeightSender
from lightning_rlhf.types import SamplingParams
from tests.distributed.launch import ROOT, free_port, python_path, run_ranks
from tests.rollout.engines import ARCHITECTURE, MAX_TOKENS, largest_gap, parameters_of, prompts_of, setup_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_GPU = ARCHITECTURE | {
    "hidden_size": 128,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
    "max_position_embeddings": 4096,
}
BOUND = 1e-2  # for kernels that round otherwise than torch's
MIB = 1 << 20


def source_of(seed=0):
    return FromConfig(ON_GPU, seed=seed)


def assert_right(engine, version):
    actor = source_of(version).causal().eval()
    engine.update_weights(parameters_of(actor), version)
    completions = generate(engine, prompts_of(16), SamplingParams(32), range(16))
    assert {completion.policy_version for completion in completions} == {version}
    assert largest_gap(actor, prompts_of(16), completions) < BOUND


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=two_gpus)])
def test_engine_runs_only_on_its_gpu(number, tmp_path):
    setup = setup_of(source_of(), tmp_path)
    before = [torch.cuda.mem_get_info(n)[0] for n in range(torch.cuda.device_count())]
    engine = VLLMEngine(gpu_memory_utilization=0.2)
    engine.start(EngineSetup(setup.model, "float32", MAX_TOKENS, setup.log, visible_gpu(torch.device("cuda", number))))
    try:
        engine.wait()
        taken = [free - torch.cuda.mem_get_info(n)[0] for n, free in enumerate(before)]
        assert taken[number] > 0.1 * torch.cuda.mem_get_info(number)[1]
        assert all(memory < 64 * MIB for n, memory in enumerate(taken) if n != number)
        assert_right(engine, 1)
    finally:
        engine.close()


@two_gpus
def test_two_ranks_have_separate_engines_and_one_on_both_gpus(tmp_path):
    first, second = run_ranks("tests.gpu.rollout_ranks:own_and_shared", 2, str(tmp_path), seconds=800)
    for result in (first, second):
        assert max(result["gaps"]) < BOUND
        assert result["same"] == first["same"]  # what both ask is generated once
    assert (first["devices"], second["devices"]) == ("0", "1")
    assert first["shared"] == "0,1"


def served(tmp_path, backend, devices):
    """Run the documented server command for this backend; yield the process and its url."""
    document = (ROOT / "docs/rollouts.md").read_text()
    command = next(block for block in re.findall(r"```bash\n(.*?)```", document, re.DOTALL) if backend in block)
    port, folder = free_port(), tmp_path / "model"
    setup_of(source_of(), folder)
    for before, after in (
        ("MODEL", str(folder)),
        (r"--host \S+ --port 8000", f"--host 127.0.0.1 --port {port}"),
        (".venv/bin/python", sys.executable),
        ("--dtype bfloat16", "--dtype float32"),
        (r"--tensor-parallel-size \d+", ""),
        (r"VLLM_API_KEY=\S+", "VLLM_API_KEY=secret"),
        (r"--kv-cache-memory-bytes \d+", "--gpu-memory-utilization 0.2"),
    ):
        command = re.sub(before, after, command)
    environment = {**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": devices}
    with Path(tmp_path, "server.log").open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return process, f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("backend", "devices"), [("shared_memory", "0"), pytest.param("nccl", "1", marks=two_gpus)], ids=str
)
def test_server_receives_every_push(backend, devices, tmp_path, monkeypatch):
    process, url = served(tmp_path, backend, devices)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = VLLMServerEngine(url, timeout=600)
    try:
        engine.start(setup_of(source_of(), tmp_path / "ours"))
        engine.wait()
        for version in (1, 2):
            assert_right(engine, version)
    finally:
        engine.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("largest", [16, 256])
def test_push_needs_the_gpu_memory_of_the_largest_parameter(largest):
    def parameters():
        for number in range(40):
            size = largest if number % 4 < 2 else 4
            yield f"w{number}", torch.empty(size << 18, device="cuda")

    sender = WeightSender()
    for bound, push in (
        (largest * MIB, lambda: sender.write(parameters())),
        (largest * MIB + 64 * MIB, lambda: [None for _ in chunks(parameters(), 64 * MIB)]),
    ):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        push()
        assert torch.cuda.max_memory_allocated() - before <= bound
    sender.close()
