"""Model sources: pretrained weights from a directory or hub id, or random weights from a configuration."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.models.adapter_files import (
    HEAD,
    adapter_directory,
    check_fits,
    is_head,
    load_adapter,
    read_lora,
    tensor_shapes,
)
from lightning_rlhf.models.attention import Attention, check_attention_package
from lightning_rlhf.models.causal import CausalLM
from lightning_rlhf.models.checks import (
    check_sizes,
    check_weights,
    memory_error,
    tensors_left_out,
)
from lightning_rlhf.models.classes import freeze_towers, language_model_class, scalar_model_class
from lightning_rlhf.models.directory import expect_model_directory
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.models.packed_attention import set_role_attention
from lightning_rlhf.models.scalar import ScalarModel
from lightning_rlhf.models.score_heads import find_head, set_head, set_scale
from lightning_rlhf.models.shared_bases import shared
from lightning_rlhf.models.tensors import Quantization
from lightning_rlhf.paths import (
    READ_ERRORS,
    expect_hub,
    hub_error_message,
    read_error_message,
)

log = logging.getLogger(__name__)
Dtype = Literal["float32", "bfloat16"]
FindClass = Callable[[PretrainedConfig], Any]  # configuration to automatic class


@dataclass(frozen=True)
class Pretrained:
    """Loads pretrained weights in safetensors from a directory or the hub. Code from the hub is never run.

    If you need no options, you can write the path in its place.

    Args:
        path: directory that ``save_pretrained`` wrote, or hub id.
        revision: branch, tag or commit of the hub repository.
        dtype: dtype of the parameters. None is bfloat16 for weights that are not trained in a run with ``bf16-mixed``,
            such as a reference or weights under adapters, and else float32. Trained weights are float32 in any case.
            With bfloat16, their products are in bfloat16.
        lora: adapters to train in place of the weights. None trains the weights.
        adapter: directory or hub id of a LoRA adapter in peft's format, which is added to the weights. A trained role
            continues to train it, and reads ``lora`` from its files, without its dropout. To set a dropout, give
            ``lora`` with the same settings and another ``dropout``. A frozen role uses the adapter as it is. You get an
            error before weights load if it belongs to another base, or is of a kind that is not supported.
        quantization: how the frozen linear layers are stored, ``nf4`` in 4 bits or ``int8``. None stores them in
            ``dtype``. Products are computed in the dtype of the inputs. Trained roles then need ``lora`` or
            ``adapter``. Needs bitsandbytes.
        train_vision: whether to train the image encoder of a vision-language model and its projector too, and not its
            text model only. Features of a frozen encoder are computed once in a run and kept, up to 1 GiB. Roles with
            the same source share them. ``lora`` puts adapters on the text model only. An export contains all weights,
            in the names of the checkpoint, and the processor.
        float32_logits: whether a head in bfloat16 returns float32, here and in the engine, instead of rounding to
            bfloat16. The log-probabilities of the two then differ less.
        attn_implementation: implementation of attention. None uses this package's, which needs no padding, or sdpa for
            architectures with which it was not tested.
    """

    path: str
    revision: str | None = None
    dtype: Dtype | None = None
    lora: LoRA | None = None
    adapter: str | None = None
    quantization: Quantization | None = None
    train_vision: bool = False
    float32_logits: bool = True
    attn_implementation: Attention | None = None

    def __post_init__(self) -> None:
        for name in ("path", "adapter"):
            value = getattr(self, name)
            if value is not None and value.startswith("~"):  # a shell expands the home directory, YAML does not
                object.__setattr__(self, name, str(Path(value).expanduser()))
        if self.adapter is not None:
            stored = read_lora(adapter_directory(self.adapter))
            dropout = 0.0 if self.lora is None else self.lora.dropout  # the only setting that is not of the weights
            if self.lora is not None and _in_order(self.lora) != _in_order(replace(stored, dropout=dropout)):
                raise UsageError(
                    f"the adapter {self.adapter!r} has its own settings, {stored}: remove lora beside adapter, or set "
                    f"the same with another dropout"
                )
            object.__setattr__(self, "lora", replace(stored, dropout=dropout))
        _check_vision(self)
        if self.quantization is not None:
            if self.quantization not in get_args(Quantization):
                raise UsageError(f"quantization must be nf4, int8 or null, got {self.quantization!r}")
            the_offered("quantization").bitsandbytes()
            if self.lora is not None and self.lora.dora:
                raise UsageError("lora: dora needs the lengths of unquantized rows: remove dora or quantization")

    def hf_config(self) -> PretrainedConfig:
        """Load the model's configuration and disable dropout.

        Raises:
            FileNotFoundError: the model is neither a directory nor a repository on the hub.
            ValueError: its ``config.json`` is damaged, or transformers does not support the architecture.
        """
        self.expect_reachable(needs_weights=False)
        try:
            config = AutoConfig.from_pretrained(self.path, revision=self.revision, trust_remote_code=False)
        except READ_ERRORS as error:
            if Path(self.path).is_dir() or not isinstance(error, OSError):  # damaged config, or unknown architecture
                reason = read_error_message(error)
                raise UsageError(f"the config.json of {self.path!r} cannot be read: {reason}") from error
            raise MissingFileError(f"no model at {self.path!r}: {hub_error_message(self.path, error)}") from None
        check_sizes(config, f"the config.json of {self.path!r}")
        _warn_of_router_logits(config, f"the config.json of {self.path!r}")
        return set_role_attention(_without_dropout(config), self.attn_implementation)

    def expect_reachable(self, needs_weights: bool = True) -> None:
        """Raise if the path is not a model's directory and the hub does not respond.

        Args:
            needs_weights: argument of :func:`~lightning_rlhf.models.directory.expect_model_directory`.

        Raises:
            FileNotFoundError: the model cannot be found.
        """
        expect_model_directory(self.path, needs_weights)
        if Path(self.path).is_dir():
            return
        try:
            expect_hub(self.path, self.revision)
        except ConnectionError as error:
            raise MissingFileError(f"no model at {self.path!r}: {hub_error_message(self.path, error)}") from None

    def causal(self) -> CausalLM:
        """Load the language model."""
        lm = self._with_adapters(self._load(language_model_class, self.hf_config(), optional=()))
        return CausalLM(lm, self.float32_logits)

    def scalar(self) -> ScalarModel:
        """Load the scalar model with the head in its files; for a language model, a head of zeros: all scores are 0.

        Raises:
            ValueError: the head has several outputs, or is of a kind that is not read.
        """
        config = self.hf_config()
        head = find_head(self.path, self.revision, config, self.adapter)
        config.num_labels = 1
        if head is not None:
            set_scale(config, head, self.path)
        is_plain = head is not None and head.is_plain
        model = self._load(scalar_model_class, config, optional=() if is_plain else ("score.",))
        if head is None:
            torch.nn.init.zeros_(model.get_parameter(HEAD))
        elif not is_plain:
            set_head(model, head)
        return ScalarModel(self._with_adapters(model))

    def expect_head(self) -> None:
        """Raise unless the files of the model or of its adapter have a head for one number.

        Raises:
            ValueError: the source is a language model, whose scores would all be 0.
        """
        stored = self.adapter is not None and any(map(is_head, tensor_shapes(adapter_directory(self.adapter))))
        if not stored and find_head(self.path, self.revision, self.hf_config(), self.adapter) is None:
            raise UsageError(
                f"{self.path} is a language model without a head for one number, so that all rewards would be 0: train "
                f"a reward model from it with RewardModule, and use that run's export"
            )

    def _with_adapters(self, model: PreTrainedModel) -> PreTrainedModel:
        """Add adapters to a loaded model, with the weights of ``adapter``."""
        _adapted(model, self.lora, self.train_vision)
        if self.adapter is not None and model.device.type != "meta":
            stored = load_adapter(model, adapter_directory(self.adapter))
            for name in ("score_mean", "score_std"):
                if name in stored:
                    setattr(model.config, name, float(stored[name]))
        return model

    @property
    def base(self) -> Pretrained:
        """The source without its adapters; models of sources with equal bases can share frozen weights."""
        return replace(self, lora=None, adapter=None)

    def _load(self, find_class: FindClass, config: PretrainedConfig, optional: tuple[str, ...]) -> PreTrainedModel:
        if getattr(config, "quantization_config", None) is not None:
            raise UsageError(
                f"the weights of {self.path!r} are stored quantized, which is not read: use the model that they were "
                f"made from, with quantization: nf4 to store it in 4 bits"
            )
        if self.lora is not None or self.quantization is not None:  # mistakes are reported before weights are read
            self.check_layers(find_class, config)
        return shared(
            self.base, find_class(config), config, lambda: self._read(find_class, config, optional), bool(optional)
        )

    def check_layers(self, find_class: FindClass, config: PretrainedConfig) -> None:
        """Raise if quantization, the settings of LoRA or the adapter do not fit the model's layers; reads no weights.

        Args:
            find_class: function that returns the model's automatic class from its configuration.
            config: configuration of the model.

        Raises:
            ValueError: one of them does not fit.
        """
        with torch.device("meta"):
            model = find_class(config).from_config(config, trust_remote_code=False)
            if self.quantization is not None:
                the_offered("quantization").names_to_quantize(model)
            _adapted(model, self.lora, self.train_vision)
            if self.adapter is not None:
                check_fits(model, adapter_directory(self.adapter), self.path)

    def _read(self, find_class: FindClass, config: PretrainedConfig, optional: tuple[str, ...]) -> PreTrainedModel:
        auto, path = find_class(config), Path(self.path)
        check_attention_package(config)
        check_weights(path)
        if torch.get_default_device().type == "meta":  # only shapes are needed; rank 0 loads the weights
            return auto.from_config(config, dtype=torch_dtype(self), trust_remote_code=False)
        try:
            with quiet_transformers():
                model, report = auto.from_pretrained(
                    self.path,
                    config=config,
                    revision=self.revision,
                    dtype=torch_dtype(self),
                    use_safetensors=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except SafetensorError as error:
            raise UsageError(f"the weights of {self.path!r} cannot be read, a file is damaged: {error}") from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" in str(error):
                raise UsageError(
                    f"the weights of {self.path!r} have other shapes than its config.json specifies"
                ) from None
            raise memory_error(error, self.path) or error from None
        except READ_ERRORS as error:
            raise UsageError(
                f"the model in {self.path!r} cannot be built from its config.json and its weights: "
                f"{read_error_message(error)}"
            ) from error
        missing = sorted(name for name in report["missing_keys"] if not name.startswith(optional or ("\0",)))
        if missing:
            raise UsageError(
                f"{self.path} lacks {len(missing)} parameters of {type(model).__name__}: {missing[:3]} ..."
            )
        if find_class is language_model_class and (names := tensors_left_out(path, model, report["unexpected_keys"])):
            listed = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
            log.warning(
                "An export will not contain all of %s: %s does not load %s", self.path, type(model).__name__, listed
            )
        if self.quantization is not None:
            the_offered("quantization").quantize(model, self.quantization)
        return model


@dataclass(frozen=True)
class FromConfig:
    """Starts from random weights, drawn from the run's seed.

    Use it to train a small model from scratch, or for a quick test without a download.

    Args:
        architecture: content of ``config.json``: ``model_type`` and the fields of that architecture.
        seed: seed of the initial weights. None derives it from the run's seed.
        dtype: dtype of the parameters. None as for :class:`Pretrained`.
        lora: adapters to train in place of the weights. None trains the weights.
        train_vision: as for :class:`Pretrained`.
        float32_logits: as for :class:`Pretrained`.
    """

    architecture: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    dtype: Dtype | None = None
    lora: LoRA | None = None
    train_vision: bool = False
    float32_logits: bool = True

    def __post_init__(self) -> None:
        _check_vision(self)

    def hf_config(self) -> PretrainedConfig:
        """Build the model's configuration with dropout disabled.

        Raises:
            ValueError: ``model_type`` is missing or unknown, or fields are misspelt or incompatible.
        """
        values = dict(self.architecture)
        model_type = values.pop("model_type", None)
        if model_type is None:
            raise UsageError("FromConfig.architecture needs 'model_type', for example 'qwen2' or 'llama'")
        if model_type not in CONFIG_MAPPING:
            near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"transformers has no model_type {model_type!r}{hint}")
        _check_spelling(values, model_type)
        try:
            config = _without_dropout(AutoConfig.for_model(model_type, **values))
        except (StrictDataclassError, ValueError, TypeError) as error:
            reason = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ")
            raise UsageError(f"transformers rejects the architecture {model_type!r}: {reason}") from None
        check_sizes(config, f"the architecture {model_type!r}")
        _warn_of_router_logits(config, f"the architecture {model_type!r}")
        set_role_attention(config)
        model_class: Any = language_model_class(config)._model_mapping[type(config)]
        config.architectures = [model_class.__name__]
        return config

    def causal(self) -> CausalLM:
        """Build the language model."""
        lm = _adapted(self._build(language_model_class, self.hf_config()), self.lora, self.train_vision)
        return CausalLM(lm, self.float32_logits)

    def scalar(self) -> ScalarModel:
        """Build the scalar model with a zero head."""
        config = self.hf_config()
        config.num_labels = 1
        model = self._build(scalar_model_class, config)
        torch.nn.init.zeros_(model.get_parameter(HEAD))
        return ScalarModel(_adapted(model, self.lora, self.train_vision))

    def expect_head(self) -> None:
        """Warn that a head of zeros gives every text the same score."""
        log.warning("A reward model from FromConfig has no trained head: all its rewards are 0.")

    def _build(self, find_class: FindClass, config: PretrainedConfig) -> PreTrainedModel:
        auto = find_class(config)
        check_attention_package(config)
        seed = derive_seed(run_seed(), "initial weights") if self.seed is None else self.seed
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs' generators too
            try:
                return auto.from_config(config, dtype=torch_dtype(self), trust_remote_code=False)
            except RuntimeError as error:
                raise memory_error(error, "FromConfig") or error from None


ModelSource = Pretrained | FromConfig


def _in_order(lora: LoRA) -> LoRA:
    """Return adapters whose modules are in alphabetical order, to compare settings."""
    targets, excluded = (names and sorted(names) for names in (lora.target_modules, lora.exclude_modules))
    return replace(lora, target_modules=targets, exclude_modules=excluded)


def torch_dtype(source: ModelSource) -> torch.dtype:
    """Return the dtype of a source's parameters, float32 by default."""
    result: torch.dtype = getattr(torch, source.dtype or "float32")
    return result


def with_dtype(source: ModelSource, is_trained: bool, mixed: bool) -> ModelSource:
    """Return a source with the dtype of its parameters in a run.

    Args:
        source: source of a role.
        is_trained: whether the role is trained; with adapters, only these are.
        mixed: whether the Trainer's precision is ``bf16-mixed``.
    """
    if source.dtype is not None:
        return source
    needs_float32 = not mixed or (is_trained and source.lora is None)
    return replace(source, dtype="float32" if needs_float32 else "bfloat16")


def as_source(source: str | ModelSource) -> ModelSource:
    """Convert a string to ``Pretrained(path=...)``; return a source unchanged."""
    return Pretrained(source) if isinstance(source, str) else source


def save_architecture(source: ModelSource, directory: str | Path) -> None:
    """Write the ``config.json`` from which an engine builds its model.

    Args:
        source: model source of the actor.
        directory: output directory, created if missing.
    """
    config = source.hf_config()
    config.dtype = torch_dtype(source)
    config.head_dtype = "float32" if source.float32_logits else "model"  # read by vLLM
    config.save_pretrained(directory)


def _check_vision(source: ModelSource) -> None:
    """Raise if the image encoder would be trained beside adapters of a frozen text model."""
    if source.train_vision and source.lora is not None:
        raise UsageError("train_vision trains weights, and with lora all weights are frozen: remove one of them")


def _adapted(model: PreTrainedModel, lora: LoRA | None, train_vision: bool) -> PreTrainedModel:
    if not train_vision:
        freeze_towers(model)
    if lora is not None:
        lora.add_to(model)
    return model


def _check_spelling(values: dict[str, Any], model_type: str) -> None:
    """Raise for misspelt architecture fields, which transformers would silently keep.

    Other unknown fields are allowed: published configurations contain fields of related architectures.
    """
    known = [*dir(CONFIG_MAPPING[model_type]()), "attn_implementation"]  # the latter is accepted but not an attribute
    for name in (name for name in values if name not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        if near and abs(len(name) - len(near[0])) <= 2:
            raise UsageError(f"the architecture {model_type!r} has no field {name!r}; did you mean {near[0]!r}?")


def _warn_of_router_logits(config: PretrainedConfig, name: str) -> None:
    if getattr(config.get_text_config(), "output_router_logits", False):
        _warn_once(f"output_router_logits in {name} has no effect: use the callback RouterReplay with balance_coef")


@functools.cache  # a configuration is read for every role and engine
def _warn_once(message: str) -> None:
    log.warning(message)


_RANDOM = ("dropout", "pdrop", "dropout_prob", "layerdrop", "jitter_noise")  # ends of names in configurations


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Disable random layers, because both log-probabilities of a ratio must come from the same network.

    They are dropout, layers that are left out at random, and noise in the routers of experts.
    """
    parts = (config, config.get_text_config(), getattr(config, "vision_config", None))
    for part in {id(part): part for part in parts if isinstance(part, PretrainedConfig)}.values():
        for name, value in part.to_dict().items():
            if name.endswith(_RANDOM) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and the table of missing keys; the caller checks and reports missing keys."""
    bar, level = transformers.utils.logging.is_progress_bar_enabled(), transformers.utils.logging.get_verbosity()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)
        if bar:
            transformers.utils.logging.enable_progress_bar()


if find_spec("kernels") is not None and find_spec("bitsandbytes") is not None:
    the_offered("quantization").bitsandbytes()  # before the class_path of an optimizer imports it
