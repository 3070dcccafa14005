"""Rewards and teachers behind HTTP: judges, reward models, reward servers, servers of token distributions."""
