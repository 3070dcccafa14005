"""A model's tensors under the names that its published files have, which are those that vLLM knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from lightning_rlhf.attention import checked_attention
from lightning_rlhf.models.tensors import whole_tensors


class PublishedNames:
    """Takes apart what transformers puts together when it loads a model, as it does itself when it saves one.

    transformers stacks the experts of a layer into one tensor; files have one for each, and so do vLLM's loaders.

    Args:
        directory: with the model's ``config.json``.
    """

    def __init__(self, directory: Path) -> None:
        config = checked_attention(AutoConfig.from_pretrained(directory, trust_remote_code=False))
        with torch.device("meta"):
            self._model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        found = {name: set(self._published(name, tensor)) for name, tensor in whole_tensors(self._model)}
        made = Counter(published for names in found.values() for published in names)
        # Several tensors that go into one of a file are not taken for it one by one.
        self._changed = {n for n, names in found.items() if names != {n} and all(made[one] == 1 for one in names)}

    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors as files have them; names that the model does not have stay what they are.

        Args:
            tensors: (name in the model, tensor), each valid only until the next.

        Yields:
            (name in files, tensor), each valid only until the next.
        """
        for name, tensor in tensors:
            if name in self._changed:
                yield from self._published(name, tensor).items()
            else:
                yield name, tensor
            del tensor  # or two would be held while the next is gathered

    def _published(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(self._model, {name: tensor}))
