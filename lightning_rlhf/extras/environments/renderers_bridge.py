"""The bridge of the package renderers, which knows the turns of some model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.data.messages import Message
from lightning_rlhf.environments.bridges import TemplateBridge
from lightning_rlhf.expected_errors import MissingPackageError, UsageError

_MARK = "MARK0OF0PROBE"
_CALL = {"type": "function", "id": "call_0", "function": {"name": "probe", "arguments": {"a": 1}}}
_CALLS: dict[str, dict[str, Any]] = {"user": {}, "tool": {"tool_calls": [_CALL]}}  # of an answer, by role of the reply


class RenderersBridge(TemplateBridge):
    """Tokens after a turn from a renderer of the package ``renderers``, which takes the turn itself into account.

    Prompts are rendered by the chat template.

    Args:
        tokenizer: tokenizer with a chat template.
        max_message_tokens: argument of :class:`~lightning_rlhf.environments.bridges.Bridge`.
        tools: JSON schemas of the tools.
        options: variables of the template.
        renderer: name of the renderer, such as ``qwen3``; None is that of the tokenizer's ``name_or_path``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_message_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        renderer: str | None = None,
    ) -> None:
        super().__init__(tokenizer, max_message_tokens, tools, options)
        self._name, self._renderer = _make_renderer(tokenizer, renderer, dict(options or {}))

    @override
    def between(
        self, turn: Sequence[int], written: Sequence[Message], before: Sequence[int] = (), expanded: bool = True
    ) -> list[int] | None:
        """None for a turn whose thoughts do not end, for example."""
        safe = [self.safe(message) for message in written]
        rendered = self._renderer.bridge_to_next_turn(list(before), list(turn), safe, tools=self._chat.tools)
        known = [*before, *turn]
        if rendered is None or rendered.token_ids[: len(known)] != known:
            return None
        ids: list[int] = rendered.token_ids[len(known) :]
        return ids

    def check_images(self) -> None:
        """Reject images in messages of the environment.

        Raises:
            ValueError: always.
        """
        raise UsageError("messages of an environment have no images with bridge: renderers: set bridge: template")

    def check(self) -> None:
        """Validate that the renderer and the chat template agree, and that the renderer continues a plain turn.

        Raises:
            ValueError: there is no template, or the renderer is that of other models.
        """
        self._check_template()
        probe = [{"role": "user", "content": _MARK}]
        before = self.ids(self._chat.render(probe, "conversation", generation=True))
        rendered = self._renderer.render_ids(probe, tools=self._chat.tools, add_generation_prompt=True)
        ends = [str(self.tokenizer.decode(ids)).rpartition(_MARK)[2] for ids in (before, rendered)]
        if ends[0] != ends[1]:
            raise UsageError(
                f"the chat template and the renderer {self._name!r} render the text between a message and an answer "
                f"differently: {ends[0]!r} and {ends[1]!r}. Use the renderer of this model, or bridge: template"
            )
        for role in self._expected_roles:
            answer = {"role": "assistant", "reasoning_content": "thoughts", "content": "answer", **_CALLS[role]}
            whole = self._renderer.render([*probe, answer], tools=self._chat.tools)
            turn = [id_ for id_, sampled in zip(whole.token_ids, whole.sampled_mask, strict=True) if sampled]
            if self.between(turn, [{"role": role, "name": "probe", "content": "reply"}], before) is None:
                raise UsageError(
                    f"the renderer {self._name!r} cannot continue an answer with a message of role {role!r}: use "
                    f"another renderer, or bridge: template"
                )


def _make_renderer(tokenizer: PreTrainedTokenizerBase, name: str | None, options: dict[str, Any]) -> tuple[str, Any]:
    """Return a renderer and its name.

    Raises:
        ValueError: it does not exist, or does not allow the tokenizer or the variables of the template.
    """
    try:
        import renderers
        from renderers.base import MODEL_RENDERER_MAP
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "bridge: renderers needs the package renderers: run pip install 'lightning-rlhf[renderers]'"
        ) from error
    known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
    name = name or MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    if name is None:
        raise UsageError(
            f"the package renderers has no renderer for the model {tokenizer.name_or_path!r}: set the "
            f"environment's renderer to the one for its family, one of {known}"
        )
    try:
        # A row keeps the thoughts of all turns, even if the template removes those of earlier turns.
        config = type(renderers.config_from_name(name))(thinking_retention="all")
        return name, renderers.create_renderer(tokenizer, config, chat_template_kwargs=options)
    except Exception as error:  # also AssertionError, for special tokens that the tokenizer does not have
        raise UsageError(f"the renderer {name!r} cannot be used: {error}; known renderers: {known}") from error
