"""A Hugging Face hub, or another server that speaks its API. Large files are known by their SHA-256, the others by the name that git gives
to their content, so every file can be verified."""

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session

from baton.models.fetch import answers
from baton.models.fetch.digest import Check
from baton.models.fetch.store import ByteStream, Changed, FetchError, Interrupted, Listing, RemoteFile, Wanted

CREDENTIALS = "a private or gated model needs a token that may read it, in HF_TOKEN or in the file that HF_TOKEN_PATH names"
REPO = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@(.+))?")
SHA256 = re.compile(r"[0-9a-f]{64}")


class Hub:
    """See `Store`."""

    def __init__(self, wanted: Wanted, stall_s: float, ca: str) -> None:
        found = REPO.fullmatch(wanted.source)
        assert found, wanted.source
        self._repo, self._revision = found[1], found[2] or "main"
        self._what, self._stall_s = wanted.source, stall_s
        self._endpoint = (wanted.endpoint or constants.ENDPOINT).rstrip("/")
        self._commit = self._revision
        trusted = ssl.create_default_context(cafile=answers.bundle(ca) or None)
        set_client_factory(lambda: httpx2.Client(verify=trusted, timeout=stall_s, follow_redirects=True))
        self._token = get_token() or False
        self._api = HfApi(endpoint=self._endpoint, token=self._token)

    def list(self, commit: str = "") -> Listing:
        with self._failing(self._what):
            try:
                info = self._api.model_info(self._repo, revision=commit or self._revision, files_metadata=True, timeout=self._stall_s)
            except HfHubHTTPError as error:
                if commit and error.response.status_code == 404:
                    raise Changed(f"{self._what}: commit {commit} is gone") from None
                raise
            except (ValueError, KeyError, TypeError):
                raise FetchError(f"{self._what}: what {self._endpoint} answers is not what a hub says") from None
        self._commit = info.sha or self._revision
        return Listing(tuple(_file(each, self._commit) for each in info.siblings or ()), self._commit)

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[ByteStream]:
        url = hf_hub_url(self._repo, file.name, revision=self._commit, endpoint=self._endpoint)
        headers = {**build_hf_headers(token=self._token), "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with self._failing(f"{self._what}: {file.name}"), get_session().stream("GET", url, headers=headers) as response:
            if response.status_code not in (200, 206):
                after = response.headers.get("retry-after")
                raise answers.refused(response.status_code, f"{self._what}: {file.name}", CREDENTIALS, after)
            first = response.history[0] if response.history else response
            # Not the plain ETag: mirrors have their own.
            tag = first.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
            if SHA256.fullmatch(tag) and SHA256.fullmatch(file.tag) and tag != file.tag:
                raise Changed(f"{self._what}: {file.name} is another version")
            ranged = response.headers.get("content-range", "") if response.status_code == 206 else ""
            yield ByteStream(answers.first_byte(ranged), self._pieces(response))

    def unchanged(self, listing: Listing) -> bool:
        return True  # a commit never changes

    def _pieces(self, response: httpx2.Response) -> Iterator[bytes]:
        with self._failing(self._what):
            yield from response.iter_raw()

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except HfHubHTTPError as error:
            response = error.response
            raise answers.refused(response.status_code, what, CREDENTIALS, response.headers.get("retry-after")) from None
        except httpx2.TimeoutException:
            raise Interrupted(f"no byte for {self._stall_s:g} s") from None
        except httpx2.TransportError as error:
            raise answers.untrusted(error, self._endpoint) or Interrupted(
                f"{str(error) or type(error).__name__} ({self._endpoint})"
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise FetchError(f"{what}: {error}") from None


def _file(told: Any, commit: str) -> RemoteFile:
    if told.size is None:
        raise FetchError(f"{told.rfilename}: the hub does not tell its size")
    if told.lfs is not None:
        return RemoteFile(told.rfilename, told.size, told.lfs.sha256, Check("sha256", told.lfs.sha256))
    return RemoteFile(told.rfilename, told.size, told.blob_id or commit, Check("git", told.blob_id) if told.blob_id else None)
