"""The command line: one module per command, and what several of them show.

`app.py` registers the commands and turns errors into messages and exit codes. `options.py` declares what commands
share, `output.py` and `progress.py` write to the terminal. Only this package knows Typer and Rich. Begin with `app.py`.
"""
