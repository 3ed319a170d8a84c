"""`python -m decode_worker --config FILE [--SECTION.KEY VALUE ...]`: one decode worker in the foreground."""

from baton.cluster.packages import enter, importing


def main() -> None:
    enter()  # before anything else is imported
    with importing():
        from baton.cluster.main import main as run
        from baton.worker.process import WorkerProcess

    run("decode", lambda config, stop: WorkerProcess(config, stop, "decode"))


if __name__ == "__main__":
    main()
