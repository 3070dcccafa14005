"""Images of rows: reading with limits, and the tokens and tensors that a model's processor makes of them."""

from importlib import import_module

_HOME = {  # loaded when they are used: workers of environments read images without torch
    "blank_image": "lightning_rlhf.extras.images.reading",
    "copy_processor": "lightning_rlhf.extras.images.processor",
    "load_processor": "lightning_rlhf.extras.images.processor",
    "read_image": "lightning_rlhf.extras.images.reading",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_rlhf.extras.images' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
