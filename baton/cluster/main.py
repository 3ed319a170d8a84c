"""The main function that all our processes share: arguments → configuration → lifecycle."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.cluster.config import Config, ConfigError
from baton.cluster.config_layers import load
from baton.cluster.guard import check_doors
from baton.cluster.lifecycle import CANNOT, LastResort, Process, Stop, run, settle
from baton.cluster.logs import setup_logging
from baton.cluster.priority import give_way
from baton.cluster.records import ROLES
from baton.cluster.witness import hold_back, listen


def read_arguments(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """`--config FILE` (repeatable) and `--section.key VALUE` or `--section.key=VALUE`. Raises ConfigError."""
    files: list[Path] = []
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"argument {argument!r}: expected --config FILE or --section.key VALUE")
        if not equals:
            try:
                value = next(rest)
            except StopIteration:
                raise ConfigError(f"argument {name}: a value is missing") from None
        if name == "--config":
            files.append(Path(value))
        else:
            flags[name.removeprefix("--")] = value
    return files, flags


def main(role: str, process: Callable[[Config, Stop], Process]) -> None:
    """Run until SIGTERM or SIGINT. Exit status: 0 after a drain, 1 after a failure, 2 (CANNOT) for a configuration or a model
    that cannot be used."""
    try:
        hold_back()  # before there is another thread
        files, flags = read_arguments(sys.argv[1:])
        config = load(files, flags=flags).config
        setup_logging(config.telemetry, os.environ.get("BATON_WORKER_NAME", role))
        if role in ROLES:
            give_way(config.launcher.worker_niceness)
        check_doors(config)
        stop = Stop()
        made = process(config, stop)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT)
    listen(lambda: stop.witness("signal"))
    gc.disable()  # until `settle`: an engine imports torch and makes much else that stays, and looking at it takes a fifth of its start
    sys.exit(asyncio.run(run(made, stop, LastResort(), settle)))
