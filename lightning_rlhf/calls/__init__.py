"""Calls of user code: rewards, environments and agents, in threads, processes and event loops."""
