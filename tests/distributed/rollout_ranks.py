"""Functions of ranks with real engines, run by :func:`tests.distributed.launch.run_ranks`."""

import dataclasses
import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import torch.distributed as dist

from lightning_rlhf.extras.gpu_buffer import transfer as gpu_buffer
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingParams
from tests.distributed.launch import ROOT
from tests.extras.gpu_buffer.test_transfer import HostBuffers
from tests.rollout.engines import END, greedy, largest_gap, prompts_of, pushed, setup_of, source_of

PROMPTS, SEEDS = prompts_of(21), list(range(100, 121))  # shares of unequal size
SAMPLING = SamplingParams(32, stop_token_ids=(END,))


def joined():
    dist.init_process_group("gloo")
    return dist.get_rank()


def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def rolled(engine, actor, rank, ranks=2):
    """Return this rank's completions, and their agreement with the trainer's model."""
    prompts, seeds = PROMPTS[rank::ranks], SEEDS[rank::ranks]
    completions = generate(engine, prompts, SAMPLING, seeds)
    likeliest = generate(engine, prompts[:2], SamplingParams(10, temperature=0), [0, 0])
    return {
        "completions": [[c.token_ids, c.logprobs, c.finish_reason] for c in completions],
        "versions": sorted({c.policy_version for c in completions}),
        "gap": largest_gap(actor, prompts, completions),
        "greedy": [c.token_ids for c in likeliest] == [greedy(actor, prompt, 10) for prompt in prompts[:2]],
    }


def own_and_shared(folder):
    """Return the results of an engine per rank and of a shared engine."""
    rank = joined()
    single, shared = VLLMEngine(), SharedEngine(VLLMEngine(max_restarts=0), 2)
    single.start(setup_of(source_of(), Path(folder, f"rank{rank}")))
    shared.start(setup_of(source_of(), Path(folder, f"shared{rank}")))
    result = {"ready": [single.wait(), shared.wait()]}
    child = psutil.Process(single._process.process.pid).environ()
    result["inherited"] = sorted(
        set(child) & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    )
    for name, engine in (("single", single), ("shared", shared)):
        result[name] = [rolled(engine, pushed(engine, source_of(seed=s), s), rank) for s in (3, 4)]
        result[f"{name} same"] = [c.token_ids for c in generate(engine, PROMPTS[:4], SAMPLING, SEEDS[:4])]
    single.close()
    if rank == 0:
        os.kill(shared._engine._process.process.pid, signal.SIGKILL)
    began = time.monotonic()
    result["killed"] = [
        error_of(lambda: generate(shared, PROMPTS[:1], SAMPLING, SEEDS[:1])),
        error_of(lambda: pushed(shared, source_of(), 5)),
    ]
    result["seconds"] = time.monotonic() - began
    shared.close()
    dist.destroy_process_group()
    return result


def tensor_parallel(folder):
    """Return the results of two ranks that share one engine of two workers."""
    rank = joined()
    # Two heads for keys, or both workers would hold the same one.
    sources = [source_of(seed=seed, num_key_value_heads=2) for seed in (1, 2)]
    engine = SharedEngine(VLLMEngine(tensor_parallel_size=2, max_restarts=0), 2)
    engine.start(setup_of(sources[0], Path(folder, f"rank{rank}")))
    result = {"ready": engine.wait()}
    result["rolled"] = [rolled(engine, pushed(engine, source, n), rank) for n, source in enumerate(sources)]
    result["difference"] = engine.first_difference(
        (n, p.detach()) for n, p in sources[1].causal().lm.named_parameters()
    )
    workers = []
    if rank == 0:
        workers = psutil.Process(engine._engine._process.process.pid).children(recursive=True)
        os.kill(next(w.pid for w in workers if "Worker" in " ".join(w.cmdline())), signal.SIGKILL)
    began = time.monotonic()
    result["killed"] = error_of(lambda: generate(engine, PROMPTS, SAMPLING, SEEDS))
    result["seconds"] = time.monotonic() - began
    engine.close()
    result["workers"], result["left"] = len(workers), len(psutil.wait_procs(workers, timeout=10)[1])
    dist.destroy_process_group()
    return result


def within_gpus(folder):
    """Return the results of two ranks that push to an engine of two workers through a buffer on each simulated GPU."""
    rank = joined()
    buffers = HostBuffers(rank)
    gpu_buffer.allocate, gpu_buffer.exported = buffers.allocate, buffers.exported
    gpu_buffer.push_within_gpu = partial(gpu_buffer.push_within_gpu, nbytes=30_000)  # several parts
    fault = Path(folder, "fault")
    os.environ |= {"BUFFER_FAULT": str(fault), "PYTHONPATH": str(ROOT)}
    fault.write_text("")
    sources = [source_of(seed=seed, num_key_value_heads=2) for seed in (1, 2)]
    arguments = {"worker_extension_cls": "tests.extras.gpu_buffer.memory_receiver.MemoryReceiver"}
    result = {}
    for name, options in (("host", {}), ("gpus", {"push_within_gpu": True, "arguments": arguments})):
        engine = SharedEngine(VLLMEngine(tensor_parallel_size=2, **options), 2)
        engine.start(setup_of(sources[0], Path(folder, f"{name}{rank}")))
        engine.wait()
        result[name] = [rolled(engine, pushed(engine, source, n), rank) for n, source in enumerate(sources)]
        if name == "host":
            engine.close()
    result["push ranks"] = engine.traits.push_ranks
    result["sizes"] = list(buffers.sizes)
    dist.barrier()
    fault.write_text("map")
    result["through the host"] = [rolled(engine, pushed(engine, sources[n], 5 + n), rank) for n in range(2)]
    engine._engine._maps_buffers = True
    dist.barrier()
    fault.write_text("load")
    result["error"] = error_of(lambda: pushed(engine, sources[1], 7))
    engine.close()
    dist.destroy_process_group()
    return result


def one_server(folder, url, pid):
    """Return the results of two ranks with one server, first for valid requests and then for failures."""
    rank = joined()
    engine, setup = VLLMServerEngine(url, timeout=120), setup_of(source_of(), Path(folder, f"rank{rank}"))
    unlike = {
        "model": setup_of(source_of(num_hidden_layers=1), Path(folder, f"other{rank}")),
        "length": dataclasses.replace(setup, max_tokens=9999),
        "dtype": dataclasses.replace(setup, dtype="bfloat16"),
    }
    engine.start(setup)
    result = {"ready": engine.wait(), "unlike": {}}
    for name, other in unlike.items():
        result["unlike"][name] = error_of(partial(began, url, other))
    result["rolled"] = [rolled(engine, pushed(engine, source_of(seed=s), s), rank) for s in (3, 4)]
    repeated = [[7] * 100 + prompt for prompt in PROMPTS[:2]]  # several blocks of the prefix cache
    for seed in (5, 6):
        actor = pushed(engine, source_of(seed=seed), seed)
        result["long"] = [
            [c.token_ids for c in generate(engine, repeated, SamplingParams(8, temperature=0), [0, 0])]
            == [greedy(actor, prompt, 8) for prompt in repeated]
            for _ in range(2)
        ]
    echoed = generate(engine, repeated, SamplingParams(2, echo=True), [0, 0])
    result["echo"] = largest_gap(actor, [prompt[:1] for prompt in repeated], echoed)
    result["too long"] = error_of(lambda: generate(engine, [[5] * 600], SAMPLING, [0]))

    def ask():
        generate(engine, PROMPTS[:3], SAMPLING, SEEDS[:3])

    # Somebody else pushes, and ends in the middle of the next push; then this run pushes again.
    server = engine._running.members[0].server
    dist.barrier()
    if rank == 0:
        server.post("/update_weight_version", {"new_version": "somebody else's"})
    dist.barrier()
    result["stale"] = error_of(ask)  # the first rank pushes again
    result["left out"] = engine.restarted
    dist.barrier()
    if rank == 0:
        server.post("/pause", mode="wait")
        server.post("/start_weight_update")
    result["again"] = rolled(engine, pushed(engine, source_of(seed=8), 8), rank)
    changed = source_of(seed=9, intermediate_size=64).causal().lm.named_parameters()
    result["changed"] = error_of(lambda: engine.update_weights(changed, 9))
    result["exhausted"] = len(list(changed)) == 0
    result["after"] = error_of(ask)
    dist.barrier()
    if rank == 0:
        os.killpg(pid, signal.SIGKILL)
    dist.barrier()
    engine._running.longest_wait = 3.0
    result["killed"] = [error_of(lambda: pushed(engine, source_of(), 10))]
    engine.close()
    dist.destroy_process_group()
    return result


def began(url, setup):
    engine = VLLMServerEngine(url, timeout=20)
    engine.start(setup)
    engine.wait()
