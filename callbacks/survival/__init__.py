"""What a run needs to continue: checkpoints, state, signals, exports."""
