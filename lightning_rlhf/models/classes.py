"""Classes of transformers for a configuration, and the parts of their models that this package calls."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from lightning_rlhf.expected_errors import UsageError


def language_model_class(config: PretrainedConfig) -> Any:
    """Return the automatic class of transformers that builds or loads a language model.

    A checkpoint of a vision-language model is loaded whole, so that an export has all its parts; only its text model is
    trained. Its text model alone is loaded where the checkpoint contains no more.

    Args:
        config: configuration of the model.

    Raises:
        ValueError: transformers has no language model for the configuration.
    """
    kinds = {auto: auto._model_mapping.get(type(config), None) for auto in _LANGUAGE_MODELS}
    named = next(iter(config.architectures or ()), None)
    for auto, model_class in kinds.items():
        if model_class is not None and model_class.__name__ == named:
            return auto
    for auto, model_class in kinds.items():
        if model_class is not None:
            return auto
    raise UsageError(
        f"transformers has no language model for the model_type {config.model_type!r}: use a causal language model, or "
        f"a vision-language model whose text model is trained"
    )


_LANGUAGE_MODELS: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForCausalLM)


def scalar_model_class(config: PretrainedConfig) -> Any:
    """Return the automatic class that builds or loads a model with a head for one number at each token.

    Where transformers has none for the architecture, a linear head without bias over its backbone is registered.

    Args:
        config: configuration of the model.

    Raises:
        ValueError: the architecture has no backbone that transformers builds from the configuration.
    """
    auto: Any = AutoModelForSequenceClassification
    if auto._model_mapping.get(type(config), None) is not None:
        return auto
    backbone = AutoModel._model_mapping.get(type(config), None)
    if not isinstance(backbone, type):
        raise UsageError(
            f"transformers has no backbone for the model_type {config.model_type!r}, so that it cannot be a critic or "
            f"reward model: use another architecture for that role"
        )
    family = next(kind for kind in backbone.__mro__ if PreTrainedModel in kind.__bases__)
    name = f"{backbone.__name__.removesuffix('Model')}ForSequenceClassification"
    prefix = family.base_model_prefix or "model"  # the name of the backbone in checkpoints of language models
    members = {"base_model_prefix": prefix, "config_class": type(config), "__module__": __name__}
    # Without exist_ok, transformers leaves its own configurations out.
    auto.register(type(config), type(name, (GenericForSequenceClassification, family), members), exist_ok=True)
    for kind in _LANGUAGE_MODELS:
        if (model_class := kind._model_mapping.get(type(config), None)) is not None:
            _share_renamings(model_class.__name__, name)
    return auto


def _share_renamings(language_model: str, classifier: str) -> None:
    """Read and write the checkpoints of a new classifier with the renamed weights of the language model, if it has any.

    transformers looks for renamings by the name of the class first, as for Qwen2-VL.

    Args:
        language_model: class of the architecture's language model.
        classifier: class of the classifier.
    """
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # older versions rename by the model type
        return
    renamings = get_checkpoint_conversion_mapping(language_model)
    if renamings is not None and get_checkpoint_conversion_mapping(classifier) is None:
        register_checkpoint_conversion_mapping(classifier, renamings)


def backbone_of(lm: Any) -> Any:
    """Return the part of a model that computes its last hidden states; None if it has no such part.

    Args:
        lm: model of transformers. The ``base_model`` of some, such as Llama 4, is the whole model.
    """
    if lm.base_model is not lm:
        return lm.base_model
    inner = getattr(lm, "language_model", lm)
    return getattr(inner, "model", None)


def text_model_of(lm: Any) -> Any:
    """Return the part of a backbone that computes hidden states of texts: all of it, or the decoder beside towers.

    Args:
        lm: model of transformers.
    """
    backbone = backbone_of(lm)
    parts = (getattr(backbone, name, None) for name in ("language_model", "text_model"))  # the latter in Idefics
    return next((part for part in parts if part is not None), backbone)


def layers_read_by_kernels(backbone: nn.Module) -> set[str]:
    """Return the names of the linear layers whose weights other code reads directly, so that they cannot be replaced.

    These are the projections of Mamba: its kernels compute with the weights, and an adapter beside them has no effect.

    Args:
        backbone: part of a model that computes hidden states.
    """
    mixers = [name for name, module in backbone.named_modules() if hasattr(module, "A_log") and hasattr(module, "D")]
    return {f"{name}.{layer}" for name in mixers for layer in ("dt_proj", "out_proj")}


def freeze_towers(lm: PreTrainedModel) -> None:
    """Disable gradients of the parts of a vision-language model that texts do not reach.

    Args:
        lm: model of transformers; changed in place.
    """
    text_model = text_model_of(lm)
    if text_model is lm.base_model:
        return
    heads = (lm.get_output_embeddings(), getattr(lm, "score", None))
    trained = {id(p) for part in (text_model, *heads) if isinstance(part, nn.Module) for p in part.parameters()}
    for parameter in lm.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
