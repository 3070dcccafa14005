"""verl's presets of rollout correction."""

from __future__ import annotations

from dataclasses import replace

from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.rejections import Rejection


class VerlCorrection(RolloutCorrection):
    """verl's presets by verl's names, such as ``VerlCorrection.bypass_ppo_clip``, as ``class_path`` or in Python.

    In the names, ``is`` stands for importance weights, ``tis`` for truncated ones, ``rs`` for rejection sampling,
    ``geo`` for the geometric mean of the tokens' ratios, ``pg`` for a policy gradient without the ratio of updates
    (bypass), ``k1`` and ``k3`` for statistics of :class:`~lightning_rlhf.objectives.rejections.Rejection`.
    """

    @classmethod
    def disabled(cls) -> VerlCorrection:
        """Compute metrics only."""
        return cls()

    @classmethod
    def decoupled_token_is(cls, upper: float = 2.0) -> VerlCorrection:
        """Truncated weights of tokens."""
        return cls("token", upper)

    @classmethod
    def decoupled_seq_is(cls, upper: float = 2.0) -> VerlCorrection:
        """Truncated weights of responses."""
        return cls("sequence", upper)

    @classmethod
    def decoupled_token_icepop(cls, upper: float = 5.0, lower: float = 0.5) -> VerlCorrection:
        """Weights of tokens, 0 out of bounds."""
        return cls("token", upper, lower, "mask")

    @classmethod
    def decoupled_seq_is_rs(
        cls, upper: float = 2.0, reject_lower: float = 0.5, reject_upper: float = 2.0
    ) -> VerlCorrection:
        """Truncated weights of responses; those whose ratio is out of bounds are rejected."""
        return cls("sequence", upper, rejections=(Rejection("k1", "sequence_sum", reject_upper, reject_lower),))

    @classmethod
    def decoupled_geo_rs(cls, reject_lower: float = 0.999, reject_upper: float = 1.001) -> VerlCorrection:
        """Responses are rejected by the geometric mean of their tokens' ratios."""
        return cls(rejections=(Rejection("k1", "sequence_mean", reject_upper, reject_lower),))

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, upper: float = 2.0, reject_lower: float = 0.999, reject_upper: float = 1.001
    ) -> VerlCorrection:
        """As ``decoupled_geo_rs``, with truncated weights of responses."""
        return replace(cls.decoupled_geo_rs(reject_lower, reject_upper), level="sequence", upper=upper)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, upper: float = 2.0, reject_lower: float = 0.999, reject_upper: float = 1.001
    ) -> VerlCorrection:
        """As ``decoupled_geo_rs``, with truncated weights of tokens."""
        return replace(cls.decoupled_geo_rs(reject_lower, reject_upper), level="token", upper=upper)

    @classmethod
    def decoupled_k3_rs(cls, reject_upper: float = 0.01) -> VerlCorrection:
        """Responses are rejected by the mean of k3 over their tokens."""
        return cls(rejections=(Rejection("k3", "sequence_mean", reject_upper),))

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, upper: float = 2.0, reject_upper: float = 0.01) -> VerlCorrection:
        """As ``decoupled_k3_rs``, with truncated weights of responses."""
        return replace(cls.decoupled_k3_rs(reject_upper), level="sequence", upper=upper)

    @classmethod
    def decoupled_k3_rs_token_tis(cls, upper: float = 2.0, reject_upper: float = 0.01) -> VerlCorrection:
        """As ``decoupled_k3_rs``, with truncated weights of tokens."""
        return replace(cls.decoupled_k3_rs(reject_upper), level="token", upper=upper)

    @classmethod
    def bypass_ppo_clip(cls) -> VerlCorrection:
        """For a clipped policy loss, whose ratio corrects."""
        return cls(bypass=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, reject_lower: float = 0.999, reject_upper: float = 1.001) -> VerlCorrection:
        """For a clipped policy loss; rejects as ``decoupled_geo_rs``."""
        return replace(cls.decoupled_geo_rs(reject_lower, reject_upper), bypass=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, reject_upper: float = 0.01) -> VerlCorrection:
        """For a clipped policy loss; rejects as ``decoupled_k3_rs``."""
        return replace(cls.decoupled_k3_rs(reject_upper), bypass=True)

    @classmethod
    def bypass_pg_is(cls, upper: float = 2.0) -> VerlCorrection:
        """For a plain policy gradient, with truncated weights of responses."""
        return cls("sequence", upper, bypass=True)

    @classmethod
    def bypass_pg_token_icepop(cls, upper: float = 5.0, lower: float = 0.5) -> VerlCorrection:
        """For a plain policy gradient, with weights of tokens, 0 out of bounds."""
        return cls("token", upper, lower, "mask", bypass=True)

    @classmethod
    def bypass_pg_geo_rs(cls, reject_lower: float = 0.999, reject_upper: float = 1.001) -> VerlCorrection:
        """For a plain policy gradient; rejects as ``decoupled_geo_rs``."""
        return replace(cls.decoupled_geo_rs(reject_lower, reject_upper), bypass=True)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, upper: float = 2.0, reject_lower: float = 0.999, reject_upper: float = 1.001
    ) -> VerlCorrection:
        """As ``bypass_pg_geo_rs``, with truncated weights of responses."""
        return replace(cls.decoupled_geo_rs_seq_tis(upper, reject_lower, reject_upper), bypass=True)

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, upper: float = 2.0, reject_lower: float = 0.999, reject_upper: float = 1.001
    ) -> VerlCorrection:
        """As ``bypass_pg_geo_rs``, with truncated weights of tokens."""
        return replace(cls.decoupled_geo_rs_token_tis(upper, reject_lower, reject_upper), bypass=True)
