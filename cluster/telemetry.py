"""Logs: one line per event on stderr, with the process's name. Nothing of prompts, outputs or keys is ever logged."""

import logging
import sys

from cluster.config import TelemetryConfig


def setup_logging(config: TelemetryConfig, process: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
