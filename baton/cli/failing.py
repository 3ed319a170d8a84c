"""What a command does when it fails in a way that is foreseen: a line on stderr, and an exit status."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import typer
from rich.console import Console

from baton.access.diagnosis import explain
from baton.client import GenerateError
from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError
from baton.cluster.registry import RegistryUnavailable
from baton.launch import state
from baton.launch.redis_server import RedisServerError


@contextmanager
def failing(err: Console) -> Iterator[None]:
    """Turns expected failures into a line on stderr and an exit status."""
    try:
        yield
    except ConfigError as error:
        err.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # the reader closed the pipe, and the interpreter would flush into it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except GenerateError as error:
        err.print(f"baton: {explain(error.reason or error.code, error.message)}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except (BatonError, RegistryUnavailable, RedisServerError, state.StateError, OSError) as error:
        err.print(f"baton: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except grpc.RpcError as error:
        err.print(f"baton: {explain(error.code().name, error.details() or '')}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
