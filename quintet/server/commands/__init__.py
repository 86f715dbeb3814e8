"""One file per command of the command line: `add_arguments(parser)` and `run(arguments) -> exit code`."""
