"""One copy of frozen weights for all models with the same source."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_rlhf.models.adapter_files import is_head
from lightning_rlhf.models.classes import backbone_of

_BASES: ContextVar[dict[Hashable, PreTrainedModel] | None] = ContextVar("bases", default=None)


@contextmanager
def sharing(bases: dict[Hashable, PreTrainedModel] | None) -> Iterator[None]:
    """Let models that are loaded in a ``with`` block use frozen weights that were loaded before, and add theirs.

    Args:
        bases: models without adapters by source, extended in place; None loads each model separately.
    """
    token = _BASES.set(bases)
    try:
        yield
    finally:
        _BASES.reset(token)


def shared(
    key: Hashable, auto: Any, config: Any, load: Callable[[], PreTrainedModel], has_new_head: bool
) -> PreTrainedModel:
    """Return a model whose backbone has the parameters of an earlier one with the same key, or load it.

    The modules are copies, so that each model has its own adapters and modes. The head of a scalar model is never
    shared; it is zero if the source has none.

    Args:
        key: source of the weights.
        auto: automatic class of transformers that builds the model.
        config: configuration of the model.
        load: function that loads the model.
        has_new_head: whether the source has no head for the model, which then starts at zero.
    """
    bases = _BASES.get()
    if bases is None:
        return load()
    key = (key, torch.get_default_device().type)  # ranks other than the first build on the meta device
    earlier = bases.get(key)
    if earlier is None:
        model = load()
        bases[key] = _copied(model)
        return model
    with torch.device("meta"):
        model = auto.from_config(config, dtype=earlier.dtype, trust_remote_code=False)
    if type(model) is type(earlier):
        return _copied(earlier)
    if type(backbone_of(model)) is not type(backbone_of(earlier)):
        return load()
    if not has_new_head:
        model = load()
        setattr(model, model.base_model_prefix, _copied(backbone_of(earlier)))
        model.tie_weights()
        return model
    setattr(model, model.base_model_prefix, _copied(backbone_of(earlier)))
    device = torch.get_default_device()
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            path, _, attribute = name.rpartition(".")
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(model.get_submodule(path), attribute, nn.Parameter(zeros))
    return model


def _copied(model: Any) -> Any:
    """Return a copy of a model's modules with the same parameters, but a separate head for one number."""
    named = model.named_parameters()
    return copy.deepcopy(model, {id(parameter): parameter for name, parameter in named if not is_head(name)})
