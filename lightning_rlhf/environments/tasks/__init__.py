"""Small tasks of several turns, for examples and tests."""
