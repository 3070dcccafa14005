"""Heads of reward models and critics as other libraries store them: their names, their layers and their scale."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.checks import stored_file, tensor_files, tensor_names

log = logging.getLogger(__name__)
# A linear layer on the last hidden state: transformers' classifiers, OpenRLHF, TRL, InternLM 2, Eurus, Beaver and
# classifiers of tokens.
_LINEAR = (
    "score", "value_head", "v_head.summary", "v_head", "regression_head", "reward_head", "rm_head", "score_head",
    "classifier",
)  # fmt: skip
_TWO_LAYERS = ("score.0", "score.2")  # of Qwen2.5-Math-RM: linear, ReLU, linear
_HEAD_FILES = ("value_head.safetensors", "value_head.bin")  # of LLaMA-Factory, beside a language model or an adapter
_LIKE_A_HEAD = re.compile(r"scor|reward|regress|value|v_head|gating|classif|critic|normalizer|rm_|out_proj|quantile")
_TRAINED = re.compile(r"Classification|Reward|Critic")  # in names of classes


class LayeredScore(nn.Sequential):
    """Linear layers with ReLU between; ``weight`` is that of the last one, as of a head of one layer."""

    @property
    def weight(self) -> Tensor:
        """(1, H) weight of the layer that computes the number."""
        last: Any = self[-1]
        return last.weight


@dataclass(frozen=True)
class ScoreHead:
    """A head for one number in the files of a model.

    Args:
        files: file of each of its tensors, by name.
        layers: names of its linear layers in order; a ReLU is between two.
    """

    files: dict[str, Path]
    layers: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """Whether transformers' classifiers have this head under this name."""
        return list(self.files) == ["score.weight"]

    def read(self) -> list[tuple[Tensor, Tensor | None]]:
        """Read weight and bias of each layer, in float32.

        Raises:
            ValueError: a file is damaged.
        """
        tensors = {}
        for name, file in self.files.items():
            with _opened(file) as opened:
                tensors[name] = opened.get_tensor(name).float()
        return [(tensors[f"{layer}.weight"], tensors.get(f"{layer}.bias")) for layer in self.layers]


def find_head(
    path: str, revision: str | None, config: PretrainedConfig, adapter: str | None = None
) -> ScoreHead | None:
    """Return the head for one number in a model's files, by the names of its tensors; ``architectures`` may be wrong.

    Args:
        path: directory or hub id of the model.
        revision: branch, tag or commit of the hub repository.
        config: configuration of the model.
        adapter: directory or hub id of an adapter, whose value head comes first.

    Returns:
        The head; None if the files contain a language model alone.

    Raises:
        ValueError: the head has several outputs, is of a kind that is not read, or is pickled; or the class in
            ``architectures`` has a head and the files have none.
    """
    stored = {name: (path, file) for name, file in tensor_files(path, revision).items()}
    stored |= _tensors_of_value_head(path, revision)
    if adapter is not None:
        stored |= _tensors_of_value_head(adapter, None)
    further = getattr(config, "value_head_prefix", None) or "score"  # OpenRLHF's name of its layer
    names = {name for name in stored if _LIKE_A_HEAD.search(name.partition(".")[0]) or name.startswith(f"{further}.")}
    if not names:
        trained = [name for name in config.architectures or () if _TRAINED.search(name)]
        if stored and trained:
            raise UsageError(
                f"{path} is a {trained[0]} by its config.json, but its files have no head for one number, such as "
                f"score.weight"
            )
        return None
    for layers in (*((layer,) for layer in (*_LINEAR, further)), _TWO_LAYERS):
        weights = {f"{layer}.weight" for layer in layers}
        if weights <= names <= weights | {f"{layer}.bias" for layer in layers}:
            files = {name: stored_file(*stored[name], revision) for name in sorted(names)}
            head = ScoreHead({name: file for name, file in files.items() if file is not None}, layers)
            _check_output(head, path)
            return head
    raise UsageError(
        f"{path} has a head of a kind that is not read, {', '.join(sorted(names)[:4])}: supported are one linear layer "
        f"(such as score, value_head or v_head.summary) and two with ReLU between (score.0, score.2), with one output"
    )


def _tensors_of_value_head(path: str, revision: str | None) -> dict[str, tuple[str, str]]:
    """Return place and file of each tensor that LLaMA-Factory stores beside a model or an adapter."""
    name, pickled = _HEAD_FILES
    file = stored_file(path, name, revision)
    if file is not None:
        return dict.fromkeys(tensor_names(file), (path, name))
    if stored_file(path, pickled, revision) is not None:
        raise UsageError(
            f"the head of {path!r} is in {pickled}, a pickled file, which can run code and is not read: write its "
            f"tensors to {name}"
        )
    return {}


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise UsageError(f"{file} is damaged: {error}") from None


def _check_output(head: ScoreHead, path: str) -> None:
    name = f"{head.layers[-1]}.weight"
    with _opened(head.files[name]) as file:
        outputs = file.get_slice(name).get_shape()[0]
    if outputs != 1:
        raise UsageError(
            f"{path} is a classifier with {outputs} labels; a critic or reward model needs one (num_labels=1): "
            f"{name} has {outputs} outputs, one for each objective or label"
        )


def scale_of(config: Mapping[str, Any], path: str) -> tuple[float, float]:
    """Return the mean and the deviation of a reward model's scores: ours, or those of OpenRLHF; else 0 and 1.

    Args:
        config: content of its ``config.json``.
        path: path of the model, for messages.

    Raises:
        ValueError: the deviation is not positive.
    """
    if "score_std" in config or not config.get("normalize_reward"):
        mean, std = config.get("score_mean"), config.get("score_std")
    else:
        mean, std = config.get("mean"), config.get("std")
    mean, std = float(mean or 0.0), 1.0 if std is None else float(std)
    if not std > 0:
        raise UsageError(f"the config.json of {path!r} has std {std}, expected a positive number")
    return mean, std


def set_scale(config: PretrainedConfig, head: ScoreHead, path: str) -> None:
    """Write the mean and deviation with which a model's authors normalise its scores as ``score_mean``, ``score_std``.

    Scores are ``(head - mean) / std``. OpenRLHF stores ``mean`` and ``std``, and uses them with ``normalize_reward``.
    The bias of a single layer becomes a part of the mean, because classifiers of transformers have no bias.

    Args:
        config: configuration of the model; changed in place.
        path: path of the model, for messages.

    Raises:
        ValueError: the deviation is not positive.
    """
    bias = head.read()[-1][1] if len(head.layers) == 1 and not head.is_plain else None
    if "score_std" not in vars(config) and getattr(config, "mean", None) is not None:
        if getattr(config, "normalize_reward", False):
            config.score_mean, config.score_std = scale_of(vars(config), path)
        else:
            given = config.mean, getattr(config, "std", 1.0)
            log.info("%s: mean %g and std %g are not used, because normalize_reward is false", path, *given)
        for name in ("mean", "std", "normalize_reward"):  # an export has one pair of numbers
            vars(config).pop(name, None)
    if bias is not None:
        config.score_mean = getattr(config, "score_mean", 0.0) - bias.item()


@torch.no_grad()
def set_head(model: PreTrainedModel, head: ScoreHead) -> None:
    """Give a classifier the head of its files.

    Args:
        model: classifier of transformers with a head for one number; changed in place.
        head: result of :func:`find_head`.
    """
    score: Any = model.get_submodule("score")
    device, dtype = score.weight.device, score.weight.dtype
    layers: list[nn.Module] = []
    for weight, bias in head.read():
        has_bias = bias is not None and len(head.layers) > 1
        layer = nn.Linear(weight.shape[1], weight.shape[0], has_bias, device, dtype)
        if device.type != "meta":
            layer.weight.copy_(weight)
            if bias is not None and has_bias:
                layer.bias.copy_(bias)
        layers += [*([nn.ReLU()] if layers else ()), layer]
    if len(layers) == 1:
        model.add_module("score", layers[0])
        return
    log.info("%s has a head of two layers with ReLU between, as Qwen2.5-Math-RM", type(model).__name__)
    model.add_module("score", LayeredScore(*layers))


def name_layered_class(directory: Path) -> None:
    """Name the class of a saved model with a head of two layers as its authors and vLLM do.

    Args:
        directory: directory of the model; its ``config.json`` is changed.
    """
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    names = [name.replace("ForSequenceClassification", "ForRewardModel") for name in config["architectures"]]
    file.write_text(json.dumps(config | {"architectures": names}, indent=2) + "\n", encoding="utf-8")
    log.info("transformers has no class for the head of %s; lightning-rlhf reads it, and vLLM that of Qwen2", directory)
