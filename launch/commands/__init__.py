"""The subcommands of `dynapipe`, one a module: `add_arguments(parser)` and `run(args) -> exit status`. `cli.py` imports
the one that is asked for.
"""
