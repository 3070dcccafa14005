"""Teachers that are not models of the trainer."""
