"""Images of rows: reading with limits, and the tokens and tensors that a model's processor makes of them."""

from lightning_rlhf.lazy_names import lazy_names

_HOME = {  # loaded when they are used: workers of environments read images without torch
    "FeatureCache": "lightning_rlhf.extras.images.model",
    "TextImages": "lightning_rlhf.extras.images.model",
    "blank_image": "lightning_rlhf.extras.images.reading",
    "check_reads_images": "lightning_rlhf.extras.images.model",
    "copy_processor": "lightning_rlhf.extras.images.processor",
    "images_alike": "lightning_rlhf.extras.images.model",
    "load_processor": "lightning_rlhf.extras.images.processor",
    "read_image": "lightning_rlhf.extras.images.reading",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
