"""A model's processor: the tokens that stand for an image in a text, and the tensors that the model reads."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto import processing_auto
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_torchvision_available

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import MissingPackageError, UsageError, counted
from lightning_rlhf.images import BadImage
from lightning_rlhf.paths import READ_ERRORS, read_error_message

_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
_SHOWN = 300  # characters of an error of transformers
_CACHED_BYTES = 1 << 29  # of the tensors of images that are kept


class ImageProcessor:
    """The processor of a vision-language model.

    Args:
        processor: processor of transformers.
        source: directory or hub id from which it was loaded.

    Raises:
        ValueError: the processor has no placeholder for images in texts.
    """

    def __init__(self, processor: Any, source: str) -> None:
        placeholder = getattr(processor, "image_token", None)
        if placeholder is None or not hasattr(processor, "replace_image_token"):
            raise UsageError(
                f"{type(processor).__name__} has no placeholder for images in texts: use a model of transformers whose "
                f"processor has an image_token, such as Qwen2.5-VL, SmolVLM or Gemma 3"
            )
        self.placeholder = str(placeholder)
        self._processor = processor
        self._feature_token = str(getattr(processor.tokenizer, "image_token", None) or placeholder)
        self._source = source
        self._expansions: dict[tuple[int, int], str] = {}
        self._tensors: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the processor, which knows the placeholder."""
        tokenizer: PreTrainedTokenizerBase = self._processor.tokenizer
        return tokenizer

    @property
    def tokens_of_images(self) -> set[str]:
        """Texts that stand for an image, or a part of one, and must not occur in other texts."""
        return {self.placeholder, self._feature_token}

    def expand(self, text: str, images: Sequence[EncodedImage]) -> str:
        """Return a text in which each placeholder is replaced by the text that stands for its image.

        Args:
            text: text with one placeholder for each image.
            images: images in their order; empty for a text without placeholders.

        Raises:
            BadImage: the numbers of placeholders and images differ, the text contains the token of a feature, or the
                processor rejects an image.
        """
        parts = text.split(self.placeholder)
        if len(parts) != len(images) + 1:
            raise BadImage(
                f"the text has {counted(len(parts) - 1, 'placeholder')} {self.placeholder!r} for "
                f"{counted(len(images), 'image')}: a message needs one part of type image for each, a plain text one "
                f"<image>, and texts must not contain the placeholder itself",
                "the numbers of placeholders and images differ",
            )
        if any(self._feature_token in part for part in parts):
            raise BadImage(
                f"the text contains {self._feature_token!r}, which stands for a part of an image: remove it",
                "the text contains a token of images",
            )
        replacements = [*map(self._expansion, images), ""]
        return "".join(part + replacement for part, replacement in zip(parts, replacements, strict=True))

    def _expansion(self, image: EncodedImage) -> str:
        """Return the text that stands for an image; it depends on the image's size only."""
        size = (image.width, image.height)
        if size not in self._expansions:
            inputs = self._process(image)
            self._expansions[size] = str(self._processor.replace_image_token(inputs, image_idx=0))
        return self._expansions[size]

    def _process(self, image: EncodedImage) -> Any:
        options = self._processor._merge_kwargs(self._processor.valid_processor_kwargs, self.tokenizer.init_kwargs)
        try:
            return self._processor.image_processor(
                [[image.open()]] if self._is_nested else [image.open()],
                **{**options["images_kwargs"], "return_tensors": "pt"},
            )
        except (ValueError, ZeroDivisionError, TypeError, IndexError) as error:
            raise BadImage(
                f"the image processor rejects an image of {image.width} x {image.height} pixels: {error}",
                "the image processor rejects an image",
            ) from error

    @property
    def _is_nested(self) -> bool:
        """Whether images are lists of the images of each text."""
        return hasattr(self._processor.image_processor, "do_image_splitting")

    def tensors(self, image: EncodedImage) -> dict[str, Tensor]:
        """Return the tensors of an image that the model reads, such as ``pixel_values``; recent ones are kept.

        Args:
            image: image that :meth:`expand` accepted.
        """
        if image.sha256 in self._tensors:
            self._tensors.move_to_end(image.sha256)
            return self._tensors[image.sha256]
        unused = {"rows", "cols", "num_crops", "num_patches", *self._processor.unused_input_names}
        inputs = {name: value for name, value in self._process(image).items() if name not in unused}
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        self._tensors[image.sha256] = tensors
        self._bytes += _size(tensors)
        while self._bytes > _CACHED_BYTES and len(self._tensors) > 1:
            self._bytes -= _size(self._tensors.popitem(last=False)[1])
        return tensors

    def save(self, directory: Path) -> None:
        """Write the tokenizer, and the files of the processor as they came; nothing to where they came from.

        Args:
            directory: directory of the model, whose ``config.json`` stays as it is.
        """
        if Path(self._source) == directory or Path(self._source).resolve() == directory.resolve():
            return
        self.tokenizer.save_pretrained(directory)
        copy_processor(self._source, directory)


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def copy_processor(source: str, directory: Path) -> None:
    """Copy the files of a processor; nothing without a processor.

    Args:
        source: directory or hub id of a model.
        directory: directory to copy to.
    """
    for name in _FILES:
        file = cached_file(
            source,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            shutil.copyfile(file, directory / name)


def image_token(config: PretrainedConfig, name: str) -> int:
    """Return the token that stands for images in the input of a model.

    Args:
        config: configuration of the model.
        name: name of the model in error messages.

    Raises:
        ValueError: the model reads texts only.
    """
    token: int | None = getattr(config, "image_token_id", None)
    if token is None:
        raise UsageError(
            f"the data have images, and {name} is a {config.model_type}, which reads texts only: use a vision-language "
            f"model, such as Qwen2.5-VL or SmolVLM, or data without images"
        )
    return token


def load_processor(source: str) -> ImageProcessor:
    """Load the processor of a directory or hub id.

    Processors that also read videos need torchvision for them; where it is not installed, they read images only.

    Args:
        source: directory that ``save_pretrained`` wrote, or hub id.

    Raises:
        ValueError: there is no processor of a vision-language model, or its files are damaged.
        ModuleNotFoundError: a package that the processor needs is missing.
    """
    path = str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
    try:
        kind = _processor_class(path)
        return ImageProcessor(kind.from_pretrained(path, trust_remote_code=False), path)
    except ImportError as error:
        raise MissingPackageError(f"the processor of {source!r} needs a package: {str(error).strip()}") from error
    except UsageError:
        raise
    except READ_ERRORS as error:
        reason = read_error_message(error)[:_SHOWN]  # some errors list all models
        raise UsageError(f"the processor in {source!r} cannot be read: {reason}") from error


def _processor_class(path: str) -> Any:
    """Return the class of a processor, without its videos where torchvision is missing."""
    settings, _ = ProcessorMixin.get_processor_dict(path)
    name = settings.get("processor_class")
    if name is None:
        config, _ = transformers.PreTrainedConfig.get_config_dict(path)
        name = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"].get(config.get("model_type"))
    kind: Any = getattr(transformers, str(name), None)
    if hasattr(kind, "_backends") and not issubclass(kind, ProcessorMixin):  # stand-in for a class that needs packages
        raise MissingPackageError(f"{name} of {path!r} needs {' and '.join(kind._backends)}: install them")
    if not (isinstance(kind, type) and issubclass(kind, ProcessorMixin)):
        got = "" if name is None else f", got {name!r}"
        raise UsageError(
            f"{path!r} has no processor of a vision-language model that transformers knows{got}: images need the "
            f"directory or hub id of one as tokenizer"
        )
    if "video_processor" not in kind.get_attributes() or is_torchvision_available():
        return kind
    return type(kind.__name__, (_WithoutVideos, kind), {"__module__": __name__})


class _WithoutVideos:
    """Mixin of processors that leaves out the part for videos."""

    @classmethod
    def _get_arguments_from_pretrained(cls, path: str, processor_dict: Any = None, **options: Any) -> list[Any]:
        parts: dict[str, Any] = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}
        names = cls.get_attributes()  # type: ignore[attr-defined]
        return [parts[name].from_pretrained(path) if name in parts else None for name in names]

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        """Accept that there is no part for videos."""
        if argument is None:
            return None
        return super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]
