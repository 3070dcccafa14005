"""A model behind an OpenAI-style API: vLLM in a process of its own, and before it a front that lets little through."""
