"""Rollout engines that run vLLM: in a process, in the trainer's process, or as a server."""
