"""A worker of vLLM that loses weights as specified in a file, like a fault of vLLM would.

``skip NAME`` skips a parameter, ``half NAME`` loads half of it, ``last NAME`` counts the last parameter of a layer
without loading it, ``packed NAME`` and ``tied`` keep packed weights of a layer and of the tied head, ``fail`` raises.
"""

import os
from pathlib import Path
from unittest.mock import patch

import torch
from vllm.model_executor.model_loader.reload import layerwise

from lightning_rlhf.rollout.vllm import receiver
from lightning_rlhf.rollout.vllm.receiver import WeightReceiver


class Forgetful(WeightReceiver):
    def receive_weights(self, path, nbytes, layout):
        model = self.model_runner.model
        with patch.object(*fault(model)):
            super().receive_weights(path, nbytes, layout)


def fault(model):
    """Return the object, the attribute to replace, and its replacement."""
    how, _, name = Path(os.environ["FORGETFUL"]).read_text().partition(" ")
    if how in ("skip", "half"):
        load = model.load_weights
        return model, "load_weights", lambda weights: load(damaged(weights, name, skip=how == "skip"))
    if how == "last":
        process, layer = layerwise._layerwise_process, model.get_submodule(name)
        return (
            layerwise,
            "_layerwise_process",
            lambda it, info: process(it, without_last(info) if it is layer else info),
        )
    if how == "packed":
        return model.get_submodule(name).quant_method, "process_weights_after_loading", keep_packed
    if how == "tied":
        return receiver, "repack_tied_head", lambda model: None
    if how == "fail":
        raise FloatingPointError("no luck today")
    assert how == "nothing", how
    return model, "training", model.training


def damaged(weights, damaged_name, skip):
    for name, weight in weights:
        if name != damaged_name:
            yield name, weight
        elif not skip:
            half = torch.zeros_like(weight)
            half[: len(weight) // 2] = weight[: len(weight) // 2]
            yield name, half


def without_last(info):
    info.loaded_weights.pop()
    return info


def keep_packed(layer):
    if "LMHead" not in type(layer).__name__:  # vLLM keeps the plain weight of these
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
