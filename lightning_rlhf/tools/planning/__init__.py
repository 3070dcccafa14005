"""Memory and communication of a run, computed without GPUs."""
