"""A simulated CUDA device: tensors report ``cuda:0``, compute on the CPU, and raise when mixed with tensors of the CPU.

Counts the operations for which a host would wait for a GPU. Not covered: kernels, the backward pass (a build of torch
for CPUs has no autograd thread for CUDA), mixed precision.
"""

import collections
import contextlib
import traceback
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]
_MAY_MIX = {aten.copy_.default, aten._to_copy.default}
_INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
}
# Methods whose bindings ask for the device before they dispatch.
_METHODS = {
    "__invert__": aten.bitwise_not.default,
    "copy_": aten.copy_.default,
    "nonzero": aten.nonzero.default,
    "contiguous": lambda tensor, **options: aten.clone.default(tensor, memory_format=torch.contiguous_format),
}
_READS = {"__int__": int, "__float__": float, "__bool__": bool, "__index__": int}


class Waits(collections.Counter):
    """The number of times that the host waited, by the line of this project that caused it; counts while ``on``."""

    on = False

    def note(self, why):
        if self.on:
            self[f"{why}: {_where()}"] += 1


waits = Waits()


def _where():
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not {".venv", "tests"} & set(path.relative_to(ROOT).parts):
            return f"{path.relative_to(ROOT)}:{frame.lineno} {frame.line}"
    return "elsewhere"


class Pretend(torch.Tensor):
    """A tensor of the simulated device.

    Args:
        inner: the tensor on the CPU that it computes with.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=CUDA, **layout)
        tensor.inner = inner
        return tensor

    def __repr__(self):
        return f"Pretend({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _inner(value):
    return value.inner if isinstance(value, Pretend) else value


def _refuse_mixed(func, args, tensors):
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, Pretend)]
    if func in _INDEX and isinstance(args[0], Pretend):  # indices may be on the CPU, and are copied
        on_cpu = [tensor for tensor in on_cpu if tensor.dtype not in (torch.long, torch.bool)]
    elif func not in _INDEX:
        on_cpu = [tensor for tensor in on_cpu if tensor.dim() > 0]
    if on_cpu:
        raise RuntimeError(f"mixed devices in {func}: {[(tuple(t.shape), t.device.type) for t in tensors]}")


def _run(func, args, kwargs):
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, Pretend)]
    if on_gpu and func not in _MAY_MIX:
        _refuse_mixed(func, args, tensors)
    to_gpu = bool(on_gpu)
    if kwargs.get("device") is not None:
        to_gpu = torch.device(kwargs["device"]).type == "cuda"
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten.copy_.default:
        to_gpu = isinstance(args[0], Pretend)
    if on_gpu:
        masks = func in _INDEX and any(t is not None and t.dtype == torch.bool for t in args[1])
        if func in _WAITS or masks:
            waits.note(func.__name__)
        elif func in _MAY_MIX and not to_gpu:
            waits.note("copy to the host")
    result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if not to_gpu or (func in _WAITS and not isinstance(result, torch.Tensor | tuple)):
        return result
    known = {id(tensor.inner): tensor for tensor in on_gpu}
    # An operation in place returns its argument.
    return tree_map(lambda t: known[id(t)] if id(t) in known else Pretend(t) if torch.is_tensor(t) else t, result)


class _Operations(TorchDispatchMode):
    """Intercepts operations without simulated tensors as arguments, such as ``torch.zeros(..., device="cuda")``."""

    def __init__(self):
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # after autograd and everything else

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Replaces functions whose Python bindings raise because this build has no CUDA device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if func in (torch.tensor, torch.as_tensor) and _names_cuda(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": None}).to(CUDA)
        if not isinstance(first, Pretend):
            return func(*args, **kwargs)
        if name == "new_tensor":
            return torch.tensor(*args[1:], dtype=first.dtype).to(CUDA)
        if name == "numpy":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name == "tolist":
            waits.note(name)
            return first.inner.tolist()
        if name in _READS:
            waits.note(name)
            return _READS[name](first.inner)
        if name == "__getitem__":
            view, indices = _view(first, args[1])
            return aten.index.Tensor(view, indices) if indices else view
        if name == "__setitem__":
            view, indices = _view(first, args[1])
            value = args[2] if isinstance(args[2], torch.Tensor) else torch.tensor(args[2], dtype=first.dtype).to(CUDA)
            aten.index_put_.default(view, indices, value) if indices else aten.copy_.default(view, value)
            return None
        if name in _METHODS:
            return _METHODS[name](*args, **kwargs)
        return func(*args, **kwargs)


def _view(tensor, index):
    """Return the view that slices, numbers and None of an index select, and its index tensors by dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        position = next(i for i, item in enumerate(items) if item is Ellipsis)
        inputs = sum(item is not None and item is not Ellipsis for item in items)
        items[position : position + 1] = [slice(None)] * (tensor.ndim - inputs)
    indices, dimension = [], 0
    for item in items:
        if isinstance(item, int):
            tensor = aten.select.int(tensor, dimension, item)
            continue
        if item is None:
            tensor = aten.unsqueeze.default(tensor, dimension)
        elif isinstance(item, slice):
            ends = [end if end is None else int(end) for end in (item.start, item.stop)]
            tensor = aten.slice.Tensor(tensor, dimension, *ends, item.step or 1)
        else:
            item = torch.as_tensor(item)
            dimension += item.ndim - 1 if item.dtype == torch.bool else 0
        indices.append(item if isinstance(item, torch.Tensor) else None)
        dimension += 1
    return tensor, indices if any(item is not None for item in indices) else []


def _names_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


@contextlib.contextmanager
def pretended_cuda():
    """Make ``cuda:0`` a device on this machine."""
    torch._C._ensureCUDADeviceGuardSet()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    waits.clear()
    try:
        with _Operations(), _Functions():
            yield waits
    finally:
        waits.on = False
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
