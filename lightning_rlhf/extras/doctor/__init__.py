"""`lightning-rlhf doctor`: checks of a machine, its installation, its links and its servers."""
