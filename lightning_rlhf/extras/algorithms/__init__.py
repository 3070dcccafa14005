"""Algorithms that a run rarely needs: distillation, mixtures, ECHO, online DPO, REBEL, KTO, and controllers."""
