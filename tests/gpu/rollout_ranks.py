"""Functions of two ranks with a GPU each, run by :func:`tests.distributed.launch.run_ranks`."""

from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rollout.engine import visible_gpu
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingParams
from tests.gpu.test_rollouts_on_gpus import ON_GPU
from tests.rollout.engines import largest_gap, parameters_of, prompts_of, setup_of


def own_and_shared(folder):
    """Return the results of an engine on each GPU, then of one engine on both."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    instance = VLLMEngine(gpu_memory_utilization=0.2)
    shared = SharedEngine(VLLMEngine(gpu_memory_utilization=0.2, tensor_parallel_size=2), 2)
    result = {"gaps": [], "shared": None}
    for name, engine in (("own", instance), ("shared", shared)):
        source = FromConfig(ON_GPU, seed=1)
        engine.start(replace(setup_of(source, Path(folder, f"{name}{rank}")), devices=visible_gpu(device)))
        engine.wait()
        actor = source.causal().eval()
        engine.update_weights(parameters_of(actor), 1)
        mine = prompts_of(9, seed=rank)
        result["gaps"].append(largest_gap(actor, mine, generate(engine, mine, SamplingParams(32), range(9))))
        dist.barrier()
    result["same"] = [c.token_ids for c in generate(shared, prompts_of(4), SamplingParams(32), range(4))]
    result["devices"] = visible(instance)
    if rank == 0:
        result["shared"] = visible(shared._engine)
    dist.barrier()
    for engine in (instance, shared):
        engine.close()
    dist.destroy_process_group()
    return result


def visible(engine):
    return psutil.Process(engine._process.process.pid).environ()["CUDA_VISIBLE_DEVICES"]
