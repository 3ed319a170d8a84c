"""`python -m baton`: the same as the `baton` command."""

from baton.cli import main

main()
