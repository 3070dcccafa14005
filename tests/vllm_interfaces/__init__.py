"""The interfaces of vLLM that this project uses, for each vLLM that it supports, and the command that lists them."""
