"""Means over ranks that have different metrics."""

import pytest

from lightning_rlhf.rollout import clock
from lightning_rlhf.rollout.clock import means_over_ranks


def test_means_are_over_the_terms_of_all_ranks_with_different_metrics(monkeypatch):
    ranks = [[{"reward/a/errors": (1.0, 4.0)}, {"reward/a/errors": (0.0, 4.0), "long/name/ü": (3.0, 2.0)}], [],
             [{"reward/a/errors": (3.0, 8.0), "b": (5.0, 1.0), "none": (0.0, 0.0)}]]  # fmt: skip
    monkeypatch.setattr(clock, "from_all_ranks", lambda _: ranks)
    assert means_over_ranks([]) == {"b": 5.0, "long/name/ü": 1.5, "reward/a/errors": 0.25}


def test_means_of_a_single_rank():
    assert means_over_ranks([{"a": (1.0, 2.0)}]) == {"a": pytest.approx(0.5)}
    assert means_over_ranks([]) == {}
