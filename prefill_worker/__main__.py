"""`python -m prefill_worker --config FILE [--SECTION.KEY VALUE ...]`: one prefill worker in the foreground."""

from baton.cluster.main import main
from prefill_worker.wiring import PrefillProcess

if __name__ == "__main__":
    main("prefill", PrefillProcess)
