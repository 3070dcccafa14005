"""One module per command. ``run(arguments)`` takes the command line after the name and returns the exit code."""
