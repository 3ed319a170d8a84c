"""The cluster, with the image on its nodes."""

import pytest
from kube import Kube, start


@pytest.fixture(scope="session")
def kube() -> Kube:
    return start()
