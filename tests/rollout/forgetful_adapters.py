"""A worker of vLLM that loses a part of all adapters, named by ``FORGETFUL``: their ``scale``, or one ``layer``'s."""

import os

from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights

from lightning_rlhf.rollout.vllm.receiver import WeightReceiver

set_lora = BaseLinearLayerWithLoRA.set_lora


def set_all_but_narrow(self, index, lora_a, lora_b):
    """Leave out the layer whose input is the widest, ``down_proj``."""
    if self.input_size == max(self.input_size, self.output_size):
        return self.reset_lora(index)
    return set_lora(self, index, lora_a, lora_b)


class ForgetfulOfAdapters(WeightReceiver):
    pass


if os.environ.get("FORGETFUL") == "scale":
    LoRALayerWeights.optimize = lambda self: self
if os.environ.get("FORGETFUL") == "layer":
    BaseLinearLayerWithLoRA.set_lora = set_all_but_narrow
