"""Small vision-language checkpoints with their processors, of the architectures that images are tested with."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

from lightning_rlhf.encoded_image import EncodedImage, sha256_of

ARCHITECTURES = (
    "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl", "mistral3", "paligemma",
    "llava_next", "llava_onevision",
)  # fmt: skip
_NAMED = {
    "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "start_image_token": "<boi>",
    "end_image_token": "<eoi>", "context_image_token": "<image>", "video_token": "<video>",
    "vision_start_token": "<boi>", "vision_end_token": "<eoi>", "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}  # fmt: skip
_SPECIAL = (
    "<pad>", "<s>", "</s>", "<unk>", "<image>", "<boi>", "<eoi>", "<video>", "<fake_token_around_image>",
    "<global-img>", "<end_of_utterance>", "<break>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
)  # fmt: skip
_CHARACTERS = "\n !,.:?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 32, "head_dim": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 48,
    "num_hidden_layers": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "initializer_range": 0.2,
}  # fmt: skip
_GRIDS = [[16, 32], [32, 16], [32, 32]]
_QWEN = {
    "depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def tokenizer(placeholder: str = "<image>", chat: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and a chat template that renders images as the placeholder."""
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *_CHARACTERS])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    characters.add_special_tokens(list(_SPECIAL))
    characters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=_NAMED,
    )
    made.chat_template = chat or _TEMPLATE.replace("PLACEHOLDER", placeholder)
    return made


def _vision(name: str) -> dict[str, Any]:
    if name == "qwen3_vl":
        return {**_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    if name in ("qwen2_vl", "qwen2_5_vl"):
        hidden = {"hidden_size": 32} if name == "qwen2_vl" else {"fullatt_block_indexes": [1], "window_size": 16}
        return {**_QWEN, **hidden}
    if name == "mistral3":
        return {"model_type": "pixtral", **_SIGLIP, "image_size": 32, "head_dim": 16}
    if name in ("llava", "llava_next"):
        return {"model_type": "clip_vision_model", **_SIGLIP}
    if name == "llava_onevision":
        return {"model_type": "siglip_vision_model", **_SIGLIP, "vision_use_head": False}
    if name == "internvl":
        return {**_SIGLIP, "image_size": [16, 16], "patch_size": [4, 4], "use_absolute_position_embeddings": True}
    if name in ("gemma3", "paligemma"):
        return {"model_type": "siglip_vision_model", **_SIGLIP, "projection_dim": 32, "vision_use_head": False}
    return dict(_SIGLIP)


def _text(name: str) -> dict[str, Any]:
    text = {**_TEXT, "vocab_size": len(_SPECIAL) + len(_CHARACTERS)}
    if name in ("idefics3", "smolvlm", "llava", "llava_next"):
        return {"model_type": "llama", **text}
    if name == "mistral3":
        return {"model_type": "mistral", **text}
    if name in ("internvl", "llava_onevision"):
        return {"model_type": "qwen2", **text}
    if name == "paligemma":
        return {"model_type": "gemma", **text}
    if name == "gemma3":
        return {**text, "sliding_window": 8, "query_pre_attn_scalar": 32}
    if name.startswith("qwen"):
        return {**text, "rope_parameters": dict(_ROPE)}
    return text


def config(name: str, **text: Any) -> Any:
    """Return the configuration of a small model, whose text model has other fields."""
    fields = architecture(name)
    fields["text_config"] |= text
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def architecture(name: str) -> dict[str, Any]:
    """Return the fields of the configuration of a small model."""
    ids = {token: number for number, token in enumerate(_SPECIAL)}
    fields: dict[str, Any] = {"image_token_id": ids["<image>"], "pad_token_id": 0, "initializer_range": 0.2}
    if name in ("idefics3", "smolvlm"):
        fields["scale_factor"] = 2
    if name.startswith("qwen"):
        fields |= {
            "video_token_id": ids["<video>"], "vision_start_token_id": ids["<boi>"],
            "vision_end_token_id": ids["<eoi>"],
        }  # fmt: skip
    if name == "gemma3":
        fields |= {"mm_tokens_per_image": 4, "boi_token_index": ids["<boi>"], "eoi_token_index": ids["<eoi>"]}
    if name == "llava":
        fields |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    if name == "llava_next":
        fields |= {
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "image_grid_pinpoints": _GRIDS,
        }
    if name == "llava_onevision":
        fields |= {
            "vision_feature_layer": -1, "image_grid_pinpoints": _GRIDS, "vision_aspect_ratio": "anyres_max_4",
            "video_token_id": ids["<video>"],
        }  # fmt: skip
    if name == "mistral3":
        fields |= {"spatial_merge_size": 2, "vision_feature_layer": -1}
    if name == "internvl":
        fields |= {"image_seq_length": 4, "downsample_ratio": 0.5}
    if name == "paligemma":
        fields |= {"projection_dim": 32, "hidden_size": 32}
    return {"model_type": name, "text_config": _text(name), "vision_config": _vision(name), **fields}


_IMAGE_PROCESSORS: dict[str, dict[str, Any]] = {
    "Idefics3ImageProcessorPil": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
    "Qwen2VLImageProcessorPil": {
        "patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
    "Gemma3ImageProcessorPil": {"size": {"height": 16, "width": 16}},
    "CLIPImageProcessorPil": {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
    "GotOcr2ImageProcessorPil": {"size": {"height": 16, "width": 16}, "max_patches": 4, "crop_to_patches": True},
    "PixtralImageProcessorPil": {"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}},
    "SiglipImageProcessorPil": {"size": {"height": 16, "width": 16}},
}  # fmt: skip
_IMAGE_PROCESSORS |= {
    f"{name}ImageProcessorPil": {
        "size": {"shortest_edge": 16} if name == "LlavaNext" else {"height": 16, "width": 16},
        "crop_size": {"height": 16, "width": 16}, "image_grid_pinpoints": _GRIDS,
    }
    for name in ("LlavaNext", "LlavaOnevision")
}  # fmt: skip
_IDEFICS = {"image_seq_len": 4}
_PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessorPil", _IDEFICS),
    "smolvlm": ("SmolVLMProcessor", "SmolVLMImageProcessorPil", _IDEFICS),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessorPil", {}),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil", {}),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessorPil", {}),
    "gemma3": ("Gemma3Processor", "Gemma3ImageProcessorPil", {"image_seq_length": 4}),
    "llava": (
        "LlavaProcessor", "CLIPImageProcessorPil",
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": (
        "LlavaNextProcessor", "LlavaNextImageProcessorPil",
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor", "LlavaOnevisionImageProcessorPil",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_4"},
    ),
    "internvl": ("InternVLProcessor", "GotOcr2ImageProcessorPil", {"image_seq_length": 4}),
    "mistral3": (
        "PixtralProcessor", "PixtralImageProcessorPil",
        {
            "patch_size": 4, "spatial_merge_size": 2, "image_token": "<image>", "image_break_token": "<break>",
            "image_end_token": "<eoi>",
        },
    ),
    "paligemma": ("PaliGemmaProcessor", "SiglipImageProcessorPil", {}),
}  # fmt: skip


def write_checkpoint(name: str, directory: Path, seed: int = 0, **text: Any) -> Path:
    """Write a small model with random weights, its tokenizer and its processor; return the directory."""
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config(name, **text)).save_pretrained(directory)
    return write_processor(name, directory)


def write_processor(name: str, directory: Path) -> Path:
    """Write a tokenizer and a processor; return the directory."""
    kind, image_kind, fields = _PROCESSORS[name]
    placeholder = {"gemma3": "<boi>"}.get(name, "<image>")
    tokenizer(f"<boi>{placeholder}<eoi>" if name.startswith("qwen") else placeholder).save_pretrained(directory)
    options = _IMAGE_PROCESSORS[image_kind.replace("SmolVLM", "Idefics3")]
    image_processor = getattr(transformers, image_kind)(**options)
    image_processor.save_pretrained(directory)
    if name == "paligemma":
        file = directory / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"image_seq_length": 16}))
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": kind, **fields}))
    if name == "internvl":  # read where torchvision is installed
        file = directory / "video_preprocessor_config.json"
        file.write_text(json.dumps({"video_processor_type": "InternVLVideoProcessor"}))
    return directory


def drawing(number: int, width: int = 24, height: int = 16) -> EncodedImage:
    """Return an image with a rectangle that depends on the number."""
    image = Image.new("RGB", (width, height), (200, 220, 240))
    left, top = number * 3 % (width // 2), number * 5 % (height // 2)
    color = (number * 67 % 256, number * 31 % 256, 40)
    ImageDraw.Draw(image).rectangle((left, top, left + width // 3, top + height // 3), fill=color)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return EncodedImage(sha256_of(buffer.getvalue()), width, height, data=buffer.getvalue())


def tensors_of(name: str, images: Sequence[EncodedImage]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of images that a model reads; without its processor, which may need missing packages."""
    _, kind, _ = _PROCESSORS[name]
    options = _IMAGE_PROCESSORS[kind.replace("SmolVLM", "Idefics3")]
    image_processor = getattr(transformers, kind)(**options)
    nested = name in ("idefics3", "smolvlm")
    unused = ("rows", "cols", "num_crops", "num_patches")
    result = []
    for image in images:
        pixels = [[image.open()]] if nested else [image.open()]
        processed = image_processor(pixels, return_tensors="pt")
        result.append({key: torch.as_tensor(value) for key, value in processed.items() if key not in unused})
    return result


def token_ids(name: str, parts: Sequence[str | int], images: Sequence[EncodedImage]) -> list[int]:
    """Return the tokens of a text whose parts are texts and numbers of images.

    Each image has a token before and after its features, as in every template that separates images.
    """
    ids = {token: number for number, token in enumerate([*_SPECIAL, *_CHARACTERS])}
    result = []
    for part in parts:
        if isinstance(part, str):
            result += [ids[letter] for letter in part]
        else:
            count = feature_count(name, tensors_of(name, [images[part]])[0])
            result += [ids["<boi>"], *[ids["<image>"]] * count, ids["<eoi>"]]
    return result


def feature_count(name: str, tensors: dict[str, torch.Tensor]) -> int:
    """Return the number of features of an image, from the settings of the small models."""
    if "image_grid_thw" in tensors:
        return int(tensors["image_grid_thw"].prod()) // 4
    if name == "mistral3":
        height, width = tensors["image_sizes"][0].tolist()
        return (height // 8) * (width // 8)
    if name == "llava":
        return 16
    if name == "llava_next":
        height, width = tensors["image_sizes"][0].tolist()
        processor = transformers.LlavaNextProcessor(
            transformers.LlavaNextImageProcessorPil(**_IMAGE_PROCESSORS["LlavaNextImageProcessorPil"]),
            tokenizer(),
            **_PROCESSORS["llava_next"][2],
        )
        return int(processor._get_number_of_features(height, width, 16, 16)) - 1  # without the class token
    parts = tensors["pixel_values"].shape[1 if tensors["pixel_values"].ndim == 5 else 0]
    return 4 * parts
