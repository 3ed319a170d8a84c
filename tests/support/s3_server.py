"""A bucket of an S3 server in this process (moto's)."""

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import boto3

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """Moto cannot write one object twice at the same time, so requests are answered one after the other."""

    def __init__(self, port: int = 0) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # a second of imports
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        answer, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

        def in_turn(*request: Any) -> list[bytes]:
            with lock:
                return [b"".join(answer(*request))]

        self._made = make_server("127.0.0.1", port, in_turn, threaded=True)
        self.address = f"http://127.0.0.1:{self._made.server_port}"
        threading.Thread(target=self._made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self._made.shutdown()
        self._made.server_close()


@cache
def server() -> Server:
    """It ends with the process."""
    return Server()


@contextmanager
def credentials() -> Iterator[None]:
    """In the environment, where clients look for them; and nothing of this machine's user."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("AWS_") or name.lower().endswith("_proxy")}
    os.environ |= {**CREDENTIALS, "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    try:
        yield
    finally:
        for name in (*CREDENTIALS, "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            del os.environ[name]
        os.environ |= hidden


@contextmanager
def bucket() -> Iterator[tuple[str, str]]:
    """URL of an empty prefix, and the server's address."""
    with credentials():
        name = f"kv-{uuid.uuid4().hex}"
        boto3.client("s3", endpoint_url=server().address).create_bucket(Bucket=name)
        yield f"s3://{name}/tier/kv", server().address
