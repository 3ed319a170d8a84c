"""API keys: who may send requests, as which tenant, and the format of a key file."""

import contextlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import ApiKeys, KeyEntry, Quota


def line(name: str, key: str, tenant: str = "") -> str:
    return f"{name} {sha256(key.encode()).hexdigest()} {tenant}\n"


def load(folder: Path, text: str) -> ApiKeys:
    path = folder / "keys"
    path.write_text(text)
    return ApiKeys.load(str(path))


def refused(known: ApiKeys, authorization: str | None) -> str:
    with pytest.raises(BatonError) as caught:
        known.tenant(authorization)
    assert caught.value.reason is Reason.UNAUTHENTICATED
    return caught.value.message


@pytest.fixture
def known(tmp_path: Path) -> ApiKeys:
    return load(
        tmp_path,
        "# two keys\n\n"
        + line("ci", "secret-1")
        + "  "
        + line("app", "secret-2", "shop").upper().replace("APP", "app").replace("SHOP", "shop"),
    )


def test_a_key_stands_for_its_tenant_or_for_its_own_name(known: ApiKeys) -> None:
    assert known
    assert known.tenant("Bearer secret-1") == "ci" and known.tenant("bearer  secret-2") == "shop"


@pytest.mark.parametrize(
    "authorization",
    [
        None, "", "Bearer", "Bearer ", "secret-1", "Basic secret-1", "Bearer secret-3", "Bearer secret-1x", "Bearer " + "x" * 10_000,
        "Bearer \ud800",
    ],
)  # fmt: skip
def test_anything_but_a_known_bearer_key_is_refused(known: ApiKeys, authorization: str | None) -> None:
    message = refused(known, authorization)
    assert "secret" not in message


def test_without_keys_every_request_is_accepted() -> None:
    nobody = ApiKeys.load(None)
    assert not nobody and nobody.tenant(None) == nobody.tenant("Bearer x") == ""


def test_limits_in_the_file_override_the_configuration(tmp_path: Path) -> None:
    text = line("a", "1", "shop tokens=50") + line("b", "2", "shop") + line("c", "3", "requests=0 tokens=7") + line("d", "4")
    path = tmp_path / "keys"
    path.write_text(text)
    known = ApiKeys.load(str(path), Quota(requests=9))
    assert {tenant: known.quota(tenant) for tenant in ("shop", "c", "d")} == {"shop": Quota(9, 50), "c": Quota(None, 7), "d": Quota(9)}
    assert known.limited and not load(tmp_path, line("d", "4")).limited and not ApiKeys().limited
    assert load(tmp_path, line("d", "4", "tokens=1")).limited


def test_keys_of_one_tenant_must_agree_on_its_limits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="b: tokens differ from those of another key of shop"):
        load(tmp_path, line("a", "1", "shop tokens=50") + line("b", "2", "shop tokens=51"))


def test_a_key_is_looked_up_by_its_hash_once_whichever_matches(known: ApiKeys) -> None:
    """So ten thousand keys cost a request no more than one, and no time depends on how much of a key is right."""

    looked: list[bytes] = []

    class Counting(dict[bytes, list[KeyEntry]]):
        def get(self, key: bytes, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

        def __iter__(self) -> Any:
            raise AssertionError("all keys were walked")

    known._entries = Counting(known._entries)
    for key in ("secret-1", "secret-2", "secret-3"):
        with contextlib.suppress(BatonError):
            known.tenant(f"Bearer {key}")
    assert looked == [sha256(key.encode()).digest() for key in ("secret-1", "secret-2", "secret-3")]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("ci\n", "keys:1: must be NAME SHA256HEX"),
        ("\nci secret\n", "keys:2: must be NAME SHA256HEX"),
        (line("ci", "k", "a b"), "must be NAME SHA256HEX"),
        (line("ci", "k", "tokens=many"), "must be NAME SHA256HEX"),
        (line("ci", "k", "bytes=1"), "must be NAME SHA256HEX"),
        (line("a/b", "k"), "names have"),
        (line("ci", "k", "x" * 65), "names have"),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.api_keys") as caught:
        load(tmp_path, text)
    assert what in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load(str(tmp_path / "nowhere"))


# Changes to the file while the router runs


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    known = load(tmp_path, line("ci", "old"))
    assert not known.refresh(), "it has not changed"
    (tmp_path / "new").write_text(line("ci", "new") + line("few", "other", "few requests=3"))
    (tmp_path / "new").replace(tmp_path / "keys")
    assert known.refresh() and not known.refresh()
    assert known.tenant("Bearer new") == "ci" and known.quota("few") == Quota(requests=3)
    assert "unknown" in refused(known, "Bearer old")


@pytest.mark.parametrize("text", ["", "no key\n", None])
def test_an_unusable_file_changes_nothing(tmp_path: Path, text: str | None) -> None:
    known = load(tmp_path, line("ci", "old"))
    (tmp_path / "keys").unlink()
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError):
        known.refresh()
    assert known.tenant("Bearer old") == "ci"
    assert not known.refresh(), "the error is reported once"
    (tmp_path / "keys").write_text(line("ci", "new"))
    assert known.refresh() and known.tenant("Bearer new") == "ci"


def test_a_tenant_whose_key_was_removed_has_no_limits(tmp_path: Path) -> None:
    """Its running requests are still charged."""
    known = load(tmp_path, line("ci", "a", "one requests=3") + line("x", "b"))
    (tmp_path / "keys").write_text(line("x", "b"))
    assert known.refresh() and known.quota("one") == Quota()
