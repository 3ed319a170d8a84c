"""The addresses that people give."""

import pytest

from baton.targets import insists, targets_of


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("localhost", ("localhost:8470",)),
        ("a:1, b,a:1", ("a:1", "b:8470")),
        (["a", "b:2"], ("a:8470", "b:2")),
        ("[::1]", ("[::1]:8470",)),
        ("[::1]:9", ("[::1]:9",)),
        ("fe80::1", ("[fe80::1]:8470",)),
        ("dns:///router", ("dns:///router:8470",)),
        ("dns:router:5", ("dns:router:5",)),
        ("dns://10.0.0.1/router:5", ("dns://10.0.0.1/router:5",)),
        ("ipv4:10.0.0.1:5,10.0.0.2:5", ("ipv4:10.0.0.1:5,10.0.0.2:5",)),
        ("unix:/run/x.sock", ("unix:/run/x.sock",)),
    ],
)
def test_a_missing_port_is_batons(given: str | list[str], targets: tuple[str, ...]) -> None:
    assert targets_of(given) == targets
    assert insists(targets) == (len(targets) > 1 or targets[0].startswith(("dns", "ipv")))


@pytest.mark.parametrize("given", ["a:99999", "a:0", "a:x", "a:", "a:²", ":8470", "http://a:1", "https://a", "dns:///a:65536", "", " , "])
def test_what_cannot_be_an_address_is_refused(given: str) -> None:
    """gRPC takes 99999 for 34463, and resolves the rest in vain."""
    with pytest.raises(ValueError, match="address"):
        targets_of(given)
