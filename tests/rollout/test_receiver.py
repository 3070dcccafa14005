"""The receiver of weights in vLLM's worker, without vLLM."""

from types import SimpleNamespace

import torch
from torch import nn

from lightning_rlhf.rollout.vllm import receiver
from lightning_rlhf.rollout.vllm.receiver import WeightReceiver
from lightning_rlhf.rollout.vllm.sync import WeightSender


class Worker(WeightReceiver):
    model_runner = SimpleNamespace(model=nn.Module())

    def __init__(self, device):
        self.device, self.received = torch.device(device), []

    def reload_weights(self, weights_iterator):
        self.received.append({name: tensor.clone() for name, tensor in weights_iterator})


def test_gpu_locks_the_pages_of_the_weights_once(monkeypatch):
    locked = []
    monkeypatch.setattr(receiver, "page_lock", lambda memory: locked.append(len(memory)))
    sender, gpu, cpu = WeightSender(), Worker("cuda"), Worker("cpu")
    for value in (1.0, 2.0):
        message = sender.write([("weight", torch.full((3, 5), value))])
        gpu.receive_weights(**message)
        cpu.receive_weights(**message)
    assert locked == [message["nbytes"]]
    for worker in (gpu, cpu):
        assert [float(weights["weight"].mean()) for weights in worker.received] == [1, 2]
    sender.close()
