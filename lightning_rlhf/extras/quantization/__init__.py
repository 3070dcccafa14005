"""Frozen linear layers in 4 or 8 bits."""

from lightning_rlhf.extras.quantization.layers import bitsandbytes as bitsandbytes
from lightning_rlhf.extras.quantization.layers import names_to_quantize as names_to_quantize
from lightning_rlhf.extras.quantization.layers import quantize as quantize
