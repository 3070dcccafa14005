"""`lightning-rlhf inspect`: a local server with the runs of a folder."""
