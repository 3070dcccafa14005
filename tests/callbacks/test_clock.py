"""Numbers that ranks tell each other, whatever names each of them has."""

import pytest
import torch

from lightning_rlhf.callbacks.clock import means_over_ranks

CPU = torch.device("cpu")


def below(*tables):
    """The rows of all ranks below each other, narrow ones padded with zeros, as a strategy gives them."""
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])


def test_means_are_over_the_terms_of_all_ranks_though_each_has_names_of_its_own():
    ranks = [[{"reward/a/errors": (1.0, 4.0)}, {"reward/a/errors": (0.0, 4.0), "long/name/ü": (3.0, 2.0)}], [],
             [{"reward/a/errors": (3.0, 8.0), "b": (5.0, 1.0), "none": (0.0, 0.0)}]]  # fmt: skip
    tables = []
    for told in ranks:
        means_over_ranks(told, lambda table: tables.append(table) or table, CPU)
    found = [means_over_ranks(told, lambda _: below(*tables), CPU) for told in ranks]
    assert found[0] == found[1] == found[2] == {"b": 5.0, "long/name/ü": 1.5, "reward/a/errors": 0.25}


def test_one_rank_tells_itself():
    assert means_over_ranks([{"a": (1.0, 2.0)}], lambda table: table, CPU) == {"a": pytest.approx(0.5)}
    assert means_over_ranks([], lambda table: table, CPU) == {}
