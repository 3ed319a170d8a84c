"""Objects of an S3-compatible store. (fsspec's own way, s3fs, asks for one version of botocore, beside which boto3 cannot be.)"""

import re
from collections.abc import Iterator, Mapping

import boto3
import botocore
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from baton.tiers.objects import Listed

URL = re.compile(r"s3://([\w.-]+)(?:/(.*))?")
OPTIONS = "endpoint_url", "region_name"


class BucketObjects:
    """See `Objects`. Credentials are found as those of every AWS client."""

    def __init__(self, url: str, options: Mapping[str, str], at_once: int, deadline_s: float) -> None:
        """Raises ValueError for a URL or an option that is not understood."""
        found = URL.fullmatch(url)
        if not found:
            raise ValueError("the address of a bucket is s3://BUCKET or s3://BUCKET/PREFIX")
        if unknown := [name for name in options if name not in OPTIONS]:
            raise ValueError(f"unknown option {unknown[0]!r}; there are {', '.join(OPTIONS)}")
        self._bucket = found[1]
        self._prefix = f"{found[2].strip('/')}/" if (found[2] or "").strip("/") else ""
        session = boto3.session.Session()
        how = Config(
            connect_timeout=deadline_s,
            read_timeout=deadline_s,
            retries={"total_max_attempts": 1},  # the tier tries again, and meanwhile computes
            max_pool_connections=at_once,
            request_checksum_calculation="when_required",  # units have digests
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if options.get("endpoint_url") else {},
            signature_version=None if session.get_credentials() else botocore.UNSIGNED,
        )
        try:
            self._client = session.client("s3", config=how, **options)
        except (BotoCoreError, ValueError) as error:
            raise ValueError(str(error)) from None

    def write(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read())
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                return None
            raise

    def list(self) -> Iterator[Listed]:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix):
            for found in page.get("Contents", ()):
                yield Listed(found["Key"].removeprefix(self._prefix), found["LastModified"].timestamp())

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
