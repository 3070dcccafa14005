"""Rollouts by vLLM servers on other machines, with weights pushed to all of them."""
