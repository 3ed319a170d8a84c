"""`python -m prefill_worker --config FILE [--SECTION.KEY VALUE ...]`: one prefill worker in the foreground."""

from baton.cluster.packages import enter


def main() -> None:
    enter()  # before anything else is imported
    from baton.cluster.main import main as run
    from prefill_worker.wiring import PrefillProcess

    run("prefill", PrefillProcess)


if __name__ == "__main__":
    main()
