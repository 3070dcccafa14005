"""Rollout engines that run vLLM: in a separate process, in the trainer's process, or as a server."""
