"""`python -m router --config FILE [--SECTION.KEY VALUE ...]`: the router in the foreground."""

from baton.cluster.main import main
from router.wiring import RouterProcess

if __name__ == "__main__":
    main("router", RouterProcess)
