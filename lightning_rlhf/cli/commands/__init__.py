"""One module per command. ``run(arguments)`` receives the arguments after the command and returns an exit code."""
