"""Figures that tests measure, for the page of ``python -m tests.proofs``."""

_test = None


def begin(item):
    """Make further figures those of a test."""
    global _test
    _test = item


def record(name, value):
    """Keep a number that the running test measured; pytest writes it into its XML report."""
    _test.user_properties.append((name, value))
