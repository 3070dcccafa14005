"""The language model in the roles of actor and reference: token ids in, log-probabilities out."""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.batching.packing import pack
from lightning_rlhf.functional.logprobs import TokenScores, chunked_token_scores
from lightning_rlhf.models.lora import adapters_off, own_weights


class CausalLM(nn.Module):
    """A transformers causal language model that answers with log-probabilities of given tokens.

    Only the hidden states that predict a wanted token meet the head, a chunk at a time: neither padding, nor prompts,
    nor the whole (B, T, V) of logits cost anything. Texts are padded on the right, so causal attention alone keeps
    real tokens from seeing padding and no attention mask is passed.

    Args:
        lm: the model, for example ``Qwen2ForCausalLM``.

    Raises:
        ValueError: the model has no head to speak of.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        if lm.get_output_embeddings() is None or lm.base_model is lm:
            raise ValueError(f"{type(lm).__name__} is no causal language model: it has no output head over a backbone")
        self.lm = lm

    def forward(
        self,
        input_ids: Tensor,
        index: Tensor,
        targets: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        squares: bool = False,
        adapters: bool = True,
        lengths: Tensor | None = None,
    ) -> TokenScores:
        """Log-probability of each target token and entropy of the distribution it was drawn from.

        Args:
            input_ids: (B, L) int64, right-padded.
            index: (B, T) int64, position in [0, L) whose hidden state predicts the target.
            targets: (B, T) int64.
            mask: (B, T) bool, which targets to score.
            temperature: divides the logits, positive.
            squares: whether to compute ``sum_pi_squared`` too.
            adapters: False asks the model as it was before LoRA adapters were added. An argument, because whoever
                spreads the model over devices acts on calls.
            lengths: (B,) int64 tokens of each row: the rows are packed into one without padding, whose positions start
                again with each; :func:`~lightning_rlhf.modules.texts.check_packing` tells whether the architecture
                keeps them apart. None leaves the padding.

        Returns:
            (B, T) each, 0 where the mask is False.
        """
        with nullcontext() if adapters else adapters_off(self.lm):
            hidden, starts = self._hidden(input_ids, lengths)
        place = starts.unsqueeze(1) + index
        scored = mask.flatten().nonzero().squeeze(1)  # once: the host waits for a GPU to learn how many there are
        head = self.lm.get_output_embeddings()
        config = self.lm.config.get_text_config()
        scores = chunked_token_scores(
            hidden[place.flatten()[scored]],
            head.weight,
            head.bias,
            targets.flatten()[scored],
            scale=_logit_scale(config) / temperature,
            softcap=getattr(config, "final_logit_softcapping", None),
            squares=squares,
        )
        zeros = torch.zeros(mask.shape, device=mask.device)
        placed = (None if values is None else zeros.masked_scatter(mask, values) for values in scores)
        return TokenScores(*placed)  # type: ignore[arg-type]

    def _hidden(self, input_ids: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """(N, H) hidden states of all rows, and (B,) where each row begins among them."""
        if lengths is None:
            hidden = self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            rows, width = input_ids.shape
            return hidden.flatten(0, 1), torch.arange(rows, device=input_ids.device) * width
        packed, positions, starts = pack(input_ids, lengths)
        hidden = self.lm.base_model(input_ids=packed, position_ids=positions, use_cache=False).last_hidden_state
        return hidden.squeeze(0), starts

    def save_pretrained(self, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write safetensors and config that ``transformers`` and vLLM load.

        Args:
            directory: where to.
            weights: the whole parameters by name, where this process has only parts of them; None takes its own.
                Adapters are merged into them.
        """
        self.lm.save_pretrained(directory, state_dict=weights or own_weights(self.lm))


def _logit_scale(config: object) -> float:
    """Constant that the architecture multiplies its logits by (Cohere) or the inverse of its divisor (Granite)."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
