"""The choice of experts in the layers of a transformers model: replaced by a given one, or recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig
from typing_extensions import override

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.models.classes import text_model_of

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NO_CHOICE = "no layer chooses experts by topk, so RouterReplay does not know this architecture"
_CHOICES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


class Routing(NamedTuple):
    """Numbers of a mixture of experts.

    Args:
        experts: number of experts of a layer.
        choices: number of experts that a token passes.
    """

    experts: int
    choices: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Routing:
        """Return the numbers of an architecture.

        Raises:
            ValueError: it is no mixture of experts, or has other numbers in different layers.
        """
        text = config.get_text_config()
        if text.model_type == "jetmoe":
            raise UsageError("RouterReplay does not support JetMoE, whose attention chooses experts too")
        experts, choices = (
            next((value for name in names if (value := getattr(text, name, None))), None)
            for names in (_EXPERTS, _CHOICES)
        )
        if not isinstance(experts, int) or not isinstance(choices, int):
            raise UsageError(
                f"the architecture {config.model_type!r} has {experts} experts and chooses {choices} of them: "
                f"RouterReplay needs a mixture of experts with the same numbers in all layers"
            )
        return cls(experts, choices)


def loads_of(chosen: Tensor, experts: int) -> Tensor:
    """Return how many of N tokens passed each expert, (L, E) float32.

    Args:
        chosen: (N, L, K) experts, -1 where they are unknown.
        experts: E.
    """
    layers = chosen.shape[1]
    places = chosen.long() + 1 + torch.arange(layers, device=chosen.device).view(-1, 1) * (experts + 1)
    counts = torch.bincount(places.flatten(), minlength=layers * (experts + 1))
    return counts.view(layers, -1)[:, 1:].float()


class Choice(TorchFunctionMode):
    """Observes how a layer chooses experts: by the ``topk`` over the scores of all experts, in every architecture.

    Args:
        given: (N, K) experts of the layer's N tokens, -1 where the layer chooses itself; None: everywhere.
    """

    def __init__(self, routing: Routing, given: Tensor | None = None) -> None:
        super().__init__()
        self._routing, self._given = routing, given
        self.own: Tensor | None = None  # (N, K) experts that the layer chose
        self.scores: Tensor | None = None  # (N, E), of which it chose the largest ones

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, own = args[0] if args else (kwargs or {})["input"], result.indices
        if scores.ndim != 2 or scores.shape[1] != self._routing.experts or own.shape[1] != self._routing.choices:
            return result  # of groups of experts, or of an attention
        if self.own is not None:
            raise RunError("a layer chooses experts twice, as in JetMoE: RouterReplay can replace one choice per layer")
        self.own, self.scores = own, scores
        if self._given is None:
            return result
        if self._given.shape != own.shape:
            ours, theirs = tuple(own.shape), tuple(self._given.shape)
            raise RunError(f"a router chooses {ours} experts (tokens, choices), but the engine returned {theirs}")
        experts = torch.where(self._given < 0, own, self._given.long())
        return torch.return_types.topk((scores.gather(1, experts), experts))


class LayerHooks:
    """Calls a function at the begin of each decoder layer and lets it observe the layer's :class:`Choice`.

    Args:
        begin: function of a layer's number and keyword arguments that returns what observes the layer, if anything.
        end: function of a layer's number and what observed it.
    """

    def __init__(
        self, lm: nn.Module, begin: Callable[[int, dict[str, Any]], Choice | None], end: Callable[[int, Choice], None]
    ) -> None:
        layers = getattr(text_model_of(lm), "layers", None)
        if not layers:
            raise UsageError(f"{type(lm).__name__} has no decoder layers named layers, whose routers could be replaced")
        self.layers = len(layers)
        self._begin, self._end = begin, end
        self._running: list[Choice | None] = []
        self._left: Choice | None = None
        self._handles = []
        for number, layer in enumerate(layers):
            self._handles.append(layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._leave, always_call=True))  # also after an error
            self._handles.append(layer.register_forward_hook(partial(self._finish, number)))

    def remove(self) -> None:
        """Leave the layers as they were."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._running.append(None)
        self._running[-1] = choice = self._begin(number, kwargs)
        if choice is not None:
            choice.__enter__()
        return args, kwargs

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._left = self._running.pop()
        if self._left is not None:
            self._left.__exit__(None, None, None)

    def _finish(self, number: int, layer: nn.Module, args: Any, output: Any) -> None:
        if self._left is not None:
            self._end(number, self._left)


class ForcedRouters:
    """Lets the routers of a model choose the experts that its layers get as ``routed_experts``.

    Args:
        lm: model whose layers pass keyword arguments on, as those of transformers do.
    """

    def __init__(self, lm: Any) -> None:
        self.routing = Routing.of(lm.config)
        self.sparse_layers: set[int] = set()  # those that have routers
        self.keeps_probabilities = False
        self._scores: dict[int, Tensor] = {}
        self._counts: Tensor | None = None  # numbers of choices, and of those that were replaced
        self._hooks = LayerHooks(lm, self._begin, self._end)

    def remove(self) -> None:
        """Let the routers choose themselves again."""
        self._hooks.remove()

    def replaced_counts(self) -> tuple[float, float]:
        """Return how many choices were given and how many of them differed from the routers' own, and forget them."""
        counts, self._counts = self._counts, None
        given, replaced = (0.0, 0.0) if counts is None else counts.tolist()
        return given, replaced

    def take_probabilities(self) -> dict[int, Tensor]:
        """Return and forget the (N, E) probabilities of the experts of each layer in the last pass with gradients.

        Some architectures choose from probabilities, others from logits.
        """
        scores, self._scores = self._scores, {}
        return {
            layer: values if torch.allclose(values.detach().sum(dim=1), values.new_ones(())) else values.softmax(dim=1)
            for layer, values in sorted(scores.items())
        }

    def _begin(self, number: int, kwargs: dict[str, Any]) -> Choice | None:
        experts = kwargs.pop("routed_experts", None)
        if experts is None:
            return None
        ours, theirs = self._hooks.layers, experts.shape[1]
        if theirs != ours:
            raise RunError(f"the engine returned experts of {theirs} layers, but the actor has {ours}")
        self._given = experts[:, number]
        return Choice(self.routing, self._given)

    def _end(self, number: int, choice: Choice) -> None:
        if choice.own is not None and choice.scores is not None:
            if self.keeps_probabilities and torch.is_grad_enabled():
                self._scores[number] = choice.scores.float()
            self.sparse_layers.add(number)
            is_given = self._given[:, 0] >= 0
            differs = (self._given.sort(dim=1).values != choice.own.sort(dim=1).values).any(dim=1) & is_given
            counts = torch.stack([is_given.sum(), differs.sum()])
            self._counts = counts if self._counts is None else self._counts + counts
        elif number + 1 == self._hooks.layers and not self.sparse_layers:
            raise RunError(_NO_CHOICE)


class ExpertRecorder:
    """Records the experts that a model chooses while it generates.

    Args:
        lm: model of transformers.
    """

    def __init__(self, lm: Any) -> None:
        self._routing = Routing.of(lm.config)
        self._layers: list[Tensor | None] = []  # (N, K) of each layer of the current pass
        self._passes: list[Tensor] = []  # (N, L, K)
        self._hooks = LayerHooks(lm, lambda number, kwargs: Choice(self._routing), self._end)

    def remove(self) -> None:
        """Record no further choices."""
        self._hooks.remove()

    def begin(self) -> None:
        """Forget earlier passes."""
        self._passes = []

    def of_rows(self, prompts: Sequence[int]) -> list[Tensor]:
        """Return the (N, L, K) int16 experts at the tokens of each row since :meth:`begin`, without padding.

        Args:
            prompts: number of tokens of each row's prompt, which is padded on the left.
        """
        first, *steps = [each.unflatten(0, (len(prompts), -1)) for each in self._passes]
        rows = torch.cat([first, *steps], dim=1).short().cpu()
        return [row[first.shape[1] - tokens :] for row, tokens in zip(rows, prompts, strict=True)]

    def _end(self, number: int, choice: Choice) -> None:
        self._layers.append(choice.own)
        if number + 1 < self._hooks.layers:
            return
        layers, self._layers = self._layers, []
        shape = next((own.shape for own in layers if own is not None), None)
        if shape is None:
            raise RunError(_NO_CHOICE)
        unknown = torch.full(shape, -1)
        self._passes.append(torch.stack([unknown if own is None else own.cpu() for own in layers], dim=1))
