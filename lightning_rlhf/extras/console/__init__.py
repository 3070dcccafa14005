"""What a run prints, and the files and tables of its responses: default callbacks of each run."""
