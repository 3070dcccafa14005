"""Torch in, torch out: no state, no module, no logging."""
