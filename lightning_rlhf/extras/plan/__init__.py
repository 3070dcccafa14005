"""`lightning-rlhf plan`: memory and traffic of a run on GPUs, computed from its configuration."""
