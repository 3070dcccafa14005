"""Loading of pushed weights in vLLM's worker; vLLM imports this module by its name."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.rollout.vllm.sync import map_memory, page_lock, read_slots

_STACKS = ("lora_a_stacked", "lora_b_stacked")  # of vLLM's layers with adapters: a tensor for each part of a layer
_PROBED_COLUMNS = 64  # enough to detect a copy of old weights, which differ in every column


class WeightReceiver:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any
    compute_weight_checksums: Any  # method of vLLM's worker: SHA-256 of each weight by its name
    reload_weights: Any  # method of vLLM's worker; it also activates vLLM's configuration, which some kernels read
    device: torch.device
    vllm_config: Any
    _memory: Tensor | None = None
    _buffer: Tensor | None = None  # during a push within a GPU

    def receive_weights(self, path: str, nbytes: int, layout: list[dict[str, Any]]) -> None:
        """Load all parameters from shared memory and update packed copies of them."""
        self._buffer = None  # of a push within GPUs that other workers could not start
        if self._memory is None or len(self._memory) != nbytes:
            self._memory = map_memory(path, nbytes)
            if self.device.type == "cuda":
                page_lock(self._memory)  # a GPU reads pageable memory at a fifth of the speed of the bus
        self.reload_weights(weights_iterator=read_slots(self._memory, layout))
        repack(self.model_runner.model)

    def open_buffers(self, messages: list[dict[str, Any]]) -> str | None:
        """Map the buffer on this worker's GPU for a push within GPUs, and check that it has the trainer's bytes.

        Returns:
            The fault, or None. It is not raised: vLLM's executor stops reading after the first error of several
            workers, and would take the others for replies to its next command.
        """
        self._buffer = None  # the one of an interrupted push, or a smaller one
        try:
            buffer = self.map_buffer(messages)
            the_offered("gpu_buffer").check_probe(buffer)
        except RuntimeError as error:
            return str(error)
        self._buffer = buffer
        return None

    def map_buffer(self, messages: list[dict[str, Any]]) -> Tensor:
        """Return the buffer on this worker's GPU as a tensor of bytes."""
        buffer: Tensor = the_offered("gpu_buffer").opened(messages, self.device)
        return buffer

    def load_part(self, layout: list[dict[str, Any]], is_first: bool) -> None:
        """Load the parameters that are in the buffer."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        assert self._buffer is not None
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            if is_first:
                initialize_layerwise_reload(model)
            # Copies, because vLLM loads a layer when it has all of its parameters, and the buffer is filled again.
            model.load_weights([(name, view.clone()) for name, view in read_slots(self._buffer, layout)])
        the_offered("gpu_buffer").wait_for(self._buffer)

    def finish_parts(self) -> None:
        """Use the loaded parameters, as ``reload_weights`` of vLLM's model runner does, and release the buffer."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self.model_runner
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(runner.get_model(), runner.model_config)
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        repack(runner.model)
        self._buffer = None

    def adapter_sums(self) -> list[float]:
        """Return the sums of the absolute values of A and of the scaled B of all adapters."""
        layers = list(self.model_runner.model.modules())
        stacks = [[part for layer in layers for part in getattr(layer, name, ())] for name in _STACKS]
        return [sum(float(part.abs().sum(dtype=torch.float64)) for part in parts) for parts in stacks]

    def trace_weights(self, path: str, nbytes: int, layout: list[dict[str, Any]]) -> tuple[list[int], str | None, str]:
        """Load all parameters again, count the elements that are read, and compare the weights of before and after.

        Returns:
            Number of elements read of each parameter, vLLM's name of the first weight that was another before, and the
            fault, which is not raised, as in :meth:`open_buffers`.
        """
        assert self._memory is not None
        held = self.compute_weight_checksums()
        trace = _Trace(self.model_runner.model, self._memory, [slot["offset"] for slot in layout])
        try:
            with trace:
                self.receive_weights(path, nbytes, layout)
        except Exception as error:
            return [], None, f"{type(error).__name__}: {error}"
        loaded = self.compute_weight_checksums()
        return trace.counts(), next((name for name in loaded if held.get(name) != loaded[name]), None), ""


class _Trace(TorchDispatchMode):
    """Recorder of the elements of the shared memory that are read while weights are loaded.

    Args:
        model: vLLM's model.
        memory: memory shared with the trainer.
        offsets: first byte of each parameter in the memory, ascending.
    """

    def __init__(self, model: nn.Module, memory: Tensor, offsets: list[int]) -> None:
        super().__init__()
        self._memory = memory
        self._offsets = offsets
        self._packed: list[Any] = [module for module in model.modules() if hasattr(module, "cpu_linear")]
        # For each copy into a packed layer: layer, first row, index of the parameter, value.
        self._filled: list[tuple[Any, int, int, Tensor]] = []
        # Number of elements by piece of each parameter; a piece that is read twice counts once.
        self._read: list[dict[Any, int]] = [{} for _ in offsets]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record the memory that it reads."""
        result = func(*args, **(kwargs or {}))
        if self._reads_values(func, result):
            for source in tree_leaves((args, kwargs)):
                if isinstance(source, Tensor) and _same_storage(source, self._memory):
                    index = bisect_right(self._offsets, source.data_ptr() - self._memory.data_ptr()) - 1
                    piece = source.data_ptr(), source.shape, source.stride()
                    self._read[index][piece] = source.numel()
                    if func is torch.ops.aten.copy_.default:
                        self._record_layer(args[0], index, source)
        return result

    def _reads_values(self, func: Any, result: Any) -> bool:
        """Return whether an operation reads values; those that create a view, an empty or a meta tensor do not."""
        # vLLM first loads into a meta copy of a layer, to count its parameters.
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = func.name()
        return not (
            name.partition(".")[0].endswith("_like")
            or name.startswith("aten::new_")
            or any(tensor.is_meta or _same_storage(tensor, self._memory) for tensor in tensors)
        )

    def _record_layer(self, target: Tensor, index: int, source: Tensor) -> None:
        for layer in self._packed:
            if source.ndim == 2 and _same_storage(layer.weight, target):
                row = target.storage_offset() // target.shape[1]
                self._filled.append((layer, row, index, source.to(target.dtype)))

    def counts(self) -> list[int]:
        """Return the number of elements read of each parameter; 0 if a CPU layer computes with an old packed copy."""
        counts = [sum(pieces.values()) for pieces in self._read]
        for owner, row, index, weight in self._filled:
            for layer in self._packed:
                tied = layer.weight.numel() > 0 and _same_storage(layer.weight, owner.weight)
                if (layer is owner or tied) and not _computes_with(layer, row, weight):
                    counts[index] = 0
        return counts


def _same_storage(left: Tensor, right: Tensor) -> bool:
    return left.device == right.device and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _computes_with(layer: Any, row: int, weight: Tensor) -> bool:
    """Return whether a layer computes with a weight in its rows from ``row``; unit vectors probe some columns."""
    width = weight.shape[1]
    columns = torch.linspace(0, width - 1, min(width, _PROBED_COLUMNS)).long()
    outputs = layer.cpu_linear(nn.functional.one_hot(columns, width).to(weight.dtype), layer.weight, None)
    return torch.equal(outputs[:, row : row + len(weight)].T, weight[:, columns])


def repack(model: nn.Module) -> None:
    """Update the packed copies of weights that vLLM 0.32 on a CPU does not update after loading."""
    repack_tied_head(model)
    repack_experts(model)


def repack_tied_head(model: nn.Module) -> None:
    """Update the packed copy of a head that is tied to the embedding."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and getattr(module, "cpu_linear", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: nn.Module) -> None:
    """Update the packed copies of experts."""
    method: Any
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if layer_is_on_cpu(layer) and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def layer_is_on_cpu(layer: Any) -> bool:
    """Return whether a layer has experts in host memory."""
    weight = getattr(layer, "w13_weight", None)
    return isinstance(weight, Tensor) and weight.device.type == "cpu"
