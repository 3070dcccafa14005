"""Images in the forward pass of a vision-language model: each distinct image is encoded once."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightning_rlhf.batching.packing import Packing
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.classes import backbone_of, language_model_class

# Models that compute prompts with images otherwise than responses are computed here.
_UNSUPPORTED = {
    "paligemma": "reads prompts in both directions",
    "llava_onevision": "computes other features for an image beside a second one",
}


def check_reads_images(role: str, config: PretrainedConfig) -> None:
    """Raise if a model cannot read the images of the data.

    Args:
        role: name of the role, for the message.
        config: configuration of the model.

    Raises:
        ValueError: the model reads texts only, or its images are not supported.
    """
    kind = config.model_type
    remedy = "use another vision-language model, such as Qwen2.5-VL or SmolVLM, or data without images"
    if getattr(config, "image_token_id", None) is None:
        raise UsageError(f"the data have images, and the {role} is a {kind}, which reads texts only: {remedy}")
    model_class = language_model_class(config)._model_mapping[type(config)]
    if kind in _UNSUPPORTED:
        raise UsageError(f"the data have images, and {kind} {_UNSUPPORTED[kind]}, which is not supported: {remedy}")
    if "mm_encoder_outputs" not in inspect.signature(model_class.forward).parameters:
        raise UsageError(
            f"the data have images, and {model_class.__name__} of transformers takes no features that were computed "
            f"before: {remedy}"
        )


@dataclass(frozen=True)
class TextImages:
    """Images of the texts of a forward pass.

    Args:
        tensors: tensors of each of N distinct images, as the model's processor makes them.
        numbers: (B, K) int64, number of the distinct image of each image of a text in their order; -1 is padding.
        keys: key of each distinct image, the same in every forward pass; empty if features are not kept.
        passes: least number of passes through the encoder, which must be equal on all ranks of some strategies.
    """

    tensors: Sequence[dict[str, Tensor]]
    numbers: Tensor
    keys: Sequence[int] = ()
    passes: int = 1

    def to(self, device: torch.device | str) -> TextImages:
        """Move the tensors to a device."""
        moved = [{name: tensor.to(device) for name, tensor in image.items()} for image in self.tensors]
        return replace(self, tensors=moved, numbers=self.numbers.to(device))

    def arguments(
        self, lm: Any, input_ids: Tensor, packing: Packing | None, cache: FeatureCache | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a backbone's forward pass, besides the token ids, for texts with these images.

        Args:
            lm: vision-language model.
            input_ids: (B, L) int64, right-padded.
            packing: layout of the texts in one row; None for padded rows.
            cache: features of earlier passes, for a frozen image encoder; None encodes all images.

        Raises:
            ValueError: the number of image tokens of a text is not that of its images' features, or rows have several
                texts.
        """
        if packing is not None and packing.width is not None:
            raise UsageError("conversations with several branches cannot have images: use prompts without images")
        features = encode_images(lm, self.tensors, self.passes) if cache is None else cache.of(lm, self)
        index = _feature_index(input_ids, features.counts, self.numbers, lm.config.image_token_id)
        placed = index if packing is None else index.flatten()[packing.tokens].unsqueeze(0)
        arguments, backbone = _placed_features(lm, features, placed), backbone_of(lm)
        if hasattr(backbone, "get_rope_index"):
            positions, _ = backbone.get_rope_index(
                input_ids, mm_token_type_ids=(index >= 0).long(), image_grid_thw=_grids(self)
            )
            if packing is not None:  # with the positions in the texts, which separate them
                in_row = positions.flatten(1)[:, packing.tokens].unsqueeze(1)
                positions = torch.cat([packing.positions.unsqueeze(0), in_row])
            arguments["position_ids"] = positions
        return arguments

    def generation_arguments(self, lm: Any, input_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of ``generate`` of transformers, besides the token ids, for prompts with these images.

        Args:
            lm: vision-language model.
            input_ids: (B, L) int64, left-padded.
        """
        features = encode_images(lm, self.tensors)
        index = _feature_index(input_ids, features.counts, self.numbers, lm.config.image_token_id)
        arguments = _placed_features(lm, features, index)
        if hasattr(backbone_of(lm), "get_rope_index"):
            arguments |= {"mm_token_type_ids": (index >= 0).long(), "image_grid_thw": _grids(self)}
        return arguments


class _Encoded:
    """Output of an image encoder, as transformers passes it to the text model.

    Args:
        features: (F, H) features of all image tokens of a forward pass, in their order.
        part: number of features of a part of an image, for architectures with a tensor of parts; None for those that
            concatenate a list.
        layers: (F, H) features that are added to the hidden states after each of the first layers.
    """

    def __init__(self, features: Tensor, part: int | None, layers: list[Tensor]) -> None:
        self.pooler_output = [features] if part is None else features.unflatten(0, (-1, part))
        self.deepstack_features = [[layer] for layer in layers]


@dataclass(frozen=True)
class ImageFeatures:
    """Features of N distinct images.

    Args:
        flat: (F, H) features of all images in their order.
        counts: number of features of each image, which are as many tokens of a text.
        part: number of features of a part of an image, for architectures with a tensor of parts; None for those that
            concatenate a list.
        layers: (F, H) features for each of the first layers; empty for most architectures.
    """

    flat: Tensor
    counts: list[int]
    part: int | None
    layers: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the features."""
        return sum(features.nbytes for features in (self.flat, *self.layers))


class FeatureCache:
    """Features of the last images that a frozen encoder has encoded.

    Args:
        max_bytes: largest number of bytes of all features.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = max_bytes
        self._features: OrderedDict[int, ImageFeatures] = OrderedDict()
        self._bytes = 0

    def of(self, lm: Any, images: TextImages) -> ImageFeatures:
        """Return the features of images; only those that are not kept are encoded.

        Args:
            lm: vision-language model with a frozen image encoder.
            images: images with keys.
        """
        for key, tensors in zip(images.keys, images.tensors, strict=True):
            if key not in self._features:
                # One by one, so that the rounding does not depend on the images beside it: a resumed run has the same
                # bits. A validation may encode an image, and training use its features.
                with torch.inference_mode(False), torch.no_grad():
                    self._features[key] = encode_images(lm, [tensors])
                self._bytes += self._features[key].nbytes
        by_image = [self._features[key] for key in images.keys]
        for key in images.keys:
            self._features.move_to_end(key)
        while self._bytes > self._max_bytes and len(self._features) > 1:
            self._bytes -= self._features.popitem(last=False)[1].nbytes
        return ImageFeatures(
            torch.cat([features.flat for features in by_image]),
            [count for features in by_image for count in features.counts],
            by_image[0].part,
            [torch.cat(layers) for layers in zip(*(features.layers for features in by_image), strict=True)],
        )


def encode_images(lm: Any, tensors: Sequence[dict[str, Tensor]], passes: int = 1) -> ImageFeatures:
    """Encode images; those whose tensors have the same shapes are encoded together.

    Args:
        lm: vision-language model.
        tensors: tensors of each image.
        passes: least number of passes through the encoder; further ones change no feature.
    """
    backbone = backbone_of(lm)
    parts: dict[int, list[Tensor]] = {}
    part = None
    groups = images_alike(tensors)
    for numbers in groups:
        output, split = _encode_alike(backbone, [tensors[number] for number in numbers])
        if isinstance(output, Tensor):
            part = output.shape[-2]
        parts |= dict(zip(numbers, split, strict=True))
    in_order = [parts[number] for number in range(len(tensors))]
    flat, *layers = (torch.cat(features) for features in zip(*in_order, strict=True))
    for _ in range(passes - len(groups)):
        _, (unused, *_) = _encode_alike(backbone, [tensors[0]])
        flat = flat + 0 * sum(features.sum() for features in unused)
    return ImageFeatures(flat, [len(features[0]) for features in in_order], part, layers)


def images_alike(tensors: Sequence[dict[str, Tensor]]) -> list[list[int]]:
    """Return the numbers of images whose tensors can be joined: of the same shapes but for the axis of parts.

    Args:
        tensors: tensors of each image.
    """
    groups: dict[Any, list[int]] = {}
    for number, image in enumerate(tensors):
        axis = _parts_axis(image)
        shapes = tuple((name, tensor.shape[axis + 1 :]) for name, tensor in image.items())
        groups.setdefault(shapes, []).append(number)
    return list(groups.values())


def _parts_axis(image: dict[str, Tensor]) -> int:
    """Return the axis along which the tensors of images are joined.

    In Idefics, an axis of texts comes before that of the parts of their images. The first axis of LLaVA-NeXT is that of
    images, so that only images with as many parts can be joined.
    """
    return 1 if image["pixel_values"].ndim == 5 and "image_sizes" not in image else 0


def _encode_alike(backbone: Any, images: Sequence[dict[str, Tensor]]) -> tuple[Any, list[list[Tensor]]]:
    """Return the output of the encoder, and (F, H) features of each image for the first and for other layers."""
    axis = _parts_axis(images[0])
    inputs = {name: torch.cat([image[name] for image in images], axis) for name in images[0]}
    output = backbone.get_image_features(**inputs, return_dict=True)
    of_layers = []
    for features in (output.pooler_output, *(getattr(output, "deepstack_features", None) or [])):
        counts = [image["pixel_values"].shape[axis] for image in images]
        if isinstance(features, Tensor):
            features = features.split(counts)
        elif axis:  # transformers 5.20 joins the parts of all images of a text
            joined = torch.cat(list(features))
            features = joined.split([count * len(joined) // sum(counts) for count in counts])
        of_layers.append([features_of_one.flatten(0, -2) for features_of_one in features])
    return output.pooler_output, [list(features) for features in zip(*of_layers, strict=True)]


def _placed_features(lm: Any, features: ImageFeatures, index: Tensor) -> dict[str, Any]:
    """Return the arguments that put features at the tokens of images.

    Args:
        lm: vision-language model.
        features: features of the distinct images.
        index: (B, L) int64 number of the feature at each token, -1 without one.
    """
    is_image = index >= 0
    chosen = index[is_image]
    layers = [layer[chosen] for layer in features.layers]
    arguments: dict[str, Any] = {
        "mm_encoder_outputs": {"image": _Encoded(features.flat[chosen], features.part, layers)}
    }
    if "token_type_ids" in inspect.signature(backbone_of(lm).forward).parameters:
        arguments["token_type_ids"] = is_image.long()
    return arguments


def _grids(images: TextImages) -> Tensor | None:
    """Return (N, 3) patches in time, height and width of all images of the texts in their order; None without any."""
    order = images.numbers.flatten()
    grids = [images.tensors[number]["image_grid_thw"] for number in order[order >= 0].tolist()]
    return torch.cat(grids) if grids else None


def _feature_index(input_ids: Tensor, counts: Sequence[int], numbers: Tensor, image_token: int) -> Tensor:
    """Return the (B, L) number of the feature at each image token, -1 at other tokens."""
    is_image = input_ids == image_token
    sizes = torch.tensor([*counts, 0], device=input_ids.device)
    starts = sizes.cumsum(0) - sizes
    of_rows = sizes[numbers]  # -1 takes the 0 at the end
    ends = of_rows.cumsum(1)
    expected, actual = ends[:, -1], is_image.sum(dim=1)
    if not torch.equal(expected, actual):
        row = int((expected != actual).nonzero()[0])
        raise UsageError(
            f"a text has {int(actual[row])} image tokens, but its images have {int(expected[row])} features: the "
            f"processor belongs to another model, or a text contains image tokens without an image"
        )
    ordinal = (is_image.cumsum(1) - 1).clamp(min=0)
    which = torch.searchsorted(ends, ordinal, right=True).clamp(max=numbers.shape[1] - 1)
    first = (starts[numbers] - (ends - of_rows)).gather(1, which)
    return torch.where(is_image, first + ordinal, -1)
