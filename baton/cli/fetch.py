"""What a person, or a Job, sees of `baton fetch`; `baton.models.fetch` does the work."""

import os
from functools import partial

import typer
from rich.console import Console

from baton.cli.options import Fetching
from baton.models.fetch import fetcher
from baton.models.fetch.fetcher import FetchOptions
from baton.models.fetch.store import FetchError, Wanted
from baton.models.fetch.stores import check, connect, included

SECRETS = ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def run(asked: Fetching, err: Console) -> None:
    """Prints the folder when it is complete."""

    def say(line: str) -> None:
        err.print(line, markup=False, soft_wrap=True)

    try:
        check(asked.source, asked.endpoint)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    wanted = Wanted(asked.source, asked.endpoint, included(asked.source, tuple(asked.include or ())))
    try:
        if asked.wait:
            fetcher.wait(wanted, asked.folder, asked.within_s, say)
        else:
            _take_secrets(asked)
            how = FetchOptions(attempts=asked.attempts, lock_s=asked.within_s, unverified=asked.unverified, verify=asked.verify)
            store = partial(connect, wanted, asked.stall_s, str(asked.ca or ""))
            made = fetcher.fetch(wanted, asked.folder, store, how, say)
            size = fetcher.amount(sum(entry.size for entry in made.files.values()))
            at = f" at {made.commit}" if made.commit else ""
            say(f"{wanted.source}{at}: {len(made.files)} files, {size}, complete")
    except FetchError as error:
        say(f"baton: {error}")
        raise typer.Exit(1) from None
    print(asked.folder)


def _take_secrets(asked: Fetching) -> None:
    """Puts secrets from files into the environment, where others cannot read them: they see the one that a process was started with."""
    if asked.secrets is None:
        return
    for name in SECRETS:
        path = asked.secrets / name
        if path.is_file() and name not in os.environ:
            os.environ[name] = path.read_text().strip()
