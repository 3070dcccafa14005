"""Sandboxes that run programs written by a policy, and the tests that programs must pass."""
