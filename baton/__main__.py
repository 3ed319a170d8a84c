"""The `baton` command, also as `python -m baton`."""

import signal

from baton.cluster.packages import enter, importing


def main() -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    enter()  # before anything else is imported
    with importing():
        from baton.cli.main import main as run

    signal.signal(signal.SIGINT, interrupt)
    run()


if __name__ == "__main__":
    main()
