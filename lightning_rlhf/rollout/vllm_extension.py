"""What vLLM's worker runs to take new weights; vLLM imports it by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_rlhf.rollout.weight_sync import map_memory, read_slots


class WeightReceiver:
    """Methods added to vLLM's worker class."""

    model_runner: Any
    _memory: Tensor | None = None

    def receive_weights(self, path: str, nbytes: int, layout: list[dict[str, Any]]) -> None:
        """Load all parameters from shared memory, packed copies included."""
        if self._memory is None or len(self._memory) != nbytes:
            self._memory = map_memory(path, nbytes)
        self.model_runner.reload_weights(weights_iterator=read_slots(self._memory, layout))
        _repack_tied_head(self.model_runner.model)


def _repack_tied_head(model: nn.Module) -> None:
    """Pack a head that is tied to the embedding anew: on CPUs vLLM 0.32 keeps the packed copy of the old weights."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and getattr(module, "cpu_linear", None) is not None:
            module.quant_method.process_weights_after_loading(module)
