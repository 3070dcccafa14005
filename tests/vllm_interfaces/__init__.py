"""The interfaces of vLLM that this project uses, in each version that it supports.

``uses`` reads from our source what we use; ``sources`` reads from vLLM's files what a version has; ``listing`` joins
both to ``versions/<version>.txt``, a line for each place in use that the version has, with its arguments::

    vllm.entrypoints.llm:LLM.sleep(level=..., mode=...)

The test holds every use against every list, without a vLLM. ``python -m tests.vllm_interfaces WHEEL`` writes a list; a
new use or a new version needs it for each version.
"""
