"""`python -m loadtest` is `baton loadtest`."""

import signal
import sys

from baton.cluster.packages import enter, importing


def main() -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    enter()  # before anything else is imported
    with importing():
        from baton.terminal import write_anything
        from loadtest.cli import app

    signal.signal(signal.SIGINT, interrupt)
    write_anything(sys.stdout, sys.stderr)
    app(prog_name="python -m loadtest")


if __name__ == "__main__":
    main()
