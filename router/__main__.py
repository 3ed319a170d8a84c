"""`python -m router --config FILE [--SECTION.KEY VALUE ...]`: the router in the foreground."""

from baton.cluster.packages import enter, importing


def main() -> None:
    enter()  # before anything else is imported
    with importing():
        from baton.cluster.main import main as run
        from router.wiring import RouterProcess

    run("router", RouterProcess)


if __name__ == "__main__":
    main()
