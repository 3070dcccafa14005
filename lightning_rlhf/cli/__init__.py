"""The command line: names everything, computes nothing."""
