"""`python -m decode_worker --config FILE [--SECTION.KEY VALUE ...]`: one decode worker in the foreground."""

from baton.cluster.main import main
from decode_worker.wiring import DecodeProcess

if __name__ == "__main__":
    main("decode", DecodeProcess)
