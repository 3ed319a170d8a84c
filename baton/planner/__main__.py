"""`python -m baton.planner --config FILE [--SECTION.KEY VALUE ...]`: the planner in the foreground."""

from baton.cluster.packages import enter, importing


def main() -> None:
    enter()  # before anything else is imported
    with importing():
        from baton.cluster.main import main as run
        from baton.planner.process import PlannerProcess

    run("planner", PlannerProcess)


if __name__ == "__main__":
    main()
