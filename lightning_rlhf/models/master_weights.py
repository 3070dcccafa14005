"""Float32 weights of trained models that compute in bfloat16.

A weight in bfloat16 has eight bits: an update of less than about 1/256 of it is rounded away, as nearly all updates at
the usual rates are. See "Mixed Precision Training", Micikevicius et al. 2018, section 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Forward = TypeVar("Forward", bound=Callable[..., Any])


def needs_master_weights(source: Any) -> bool:
    """Return whether the trained weights of a source are in bfloat16; adapters over such weights are in float32."""
    return source.dtype == "bfloat16" and source.lora is None


def use_master_weights(role: nn.Module) -> None:
    """Convert a model's weights to float32, in which an optimizer changes them; its products stay in bfloat16."""
    role.float()
    role.computes_in_bfloat16 = True  # type: ignore[assignment]


def in_bfloat16_if_chosen(forward: Forward) -> Forward:
    """Wrap a model's ``forward`` so that its products are in bfloat16 after :func:`use_master_weights`."""

    @functools.wraps(forward)
    def wrapped(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.computes_in_bfloat16:
            return forward(self, input_ids, *args, **kwargs)
        with torch.autocast(input_ids.device.type, torch.bfloat16):
            return forward(self, input_ids, *args, **kwargs)

    return wrapped  # type: ignore[return-value]
