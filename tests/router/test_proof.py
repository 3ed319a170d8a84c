"""A worker proves itself before it serves another role: one that lies, or did not switch, is not admitted."""

from dataclasses import replace

import pytest
from proving_workers import ProvingWorkers

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import RoleName
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.workers import Times
from router.proof import TIE, TOKENS, parting, prove, usable
from router.request import Token
from router.view import ClusterView


def proving(name: str, role: RoleName, sizes: tuple[int, int] = (2, 2), **how: str) -> tuple[ProvingWorkers, BatonError | None]:
    """What became of it."""

    async def main() -> tuple[ProvingWorkers, BatonError | None]:
        cluster = SimulatedCluster(Sizes(*sizes), Times(), RouterConfig())
        workers = ProvingWorkers(cluster.fleet, **how)
        view: ClusterView = cluster.routers[0].view
        worker = view.members.record(name)
        try:
            await prove(workers, usable(view.members, worker), worker, (role,))
        except BatonError as error:
            return workers, error
        finally:
            assert not cluster.fleet.leases, "a lease was left"
            await cluster.fleet.close()
        return workers, None

    return virtual_time.run(main())


@pytest.mark.parametrize(("name", "role"), [("decode-0", "prefill"), ("prefill-0", "decode")])
def test_a_worker_that_says_what_others_say_is_admitted(name: str, role: RoleName) -> None:
    workers, error = proving(name, role)
    assert error is None and workers.wishes == [(name, (role,), True)], "it accepts work, and nobody is told"
    assert (name, role) in workers.asked and TOKENS > 1


@pytest.mark.parametrize(("name", "role"), [("decode-0", "prefill"), ("prefill-0", "decode")])
def test_a_worker_that_lies_is_not_admitted(name: str, role: RoleName) -> None:
    """Negative control: without the proof it would serve, and its record would look as good as any."""
    workers, error = proving(name, role, liar=name)
    assert error is not None and f"{name} is not admitted to {role}" in str(error)
    before = "decode" if role == "prefill" else "prefill"
    assert workers.wishes[-1] == (name, (before,), False), "it serves what it did before"


def test_a_worker_that_did_not_switch_is_not_admitted() -> None:
    workers, error = proving("decode-0", "prefill", stuck="decode-0")
    assert error is not None and error.reason is Reason.WRONG_ROLE and workers.wishes[-1] == ("decode-0", ("decode",), False)


def test_the_only_prefill_worker_proves_that_it_decodes() -> None:
    workers, error = proving("prefill-0", "decode", sizes=(1, 1))
    assert error is None and ("prefill-0", "decode") in workers.asked
    workers, error = proving("prefill-0", "decode", sizes=(1, 1), liar="prefill-0")
    assert error is not None and "not admitted" in str(error)


def test_without_another_decode_worker_there_is_nothing_to_compare_with() -> None:
    _, error = proving("decode-0", "prefill", sizes=(1, 1))
    assert error is not None and "no other worker decodes" in str(error)


def test_what_it_serves_already_needs_no_proof() -> None:
    workers, error = proving("decode-0", "decode")
    assert error is None and not workers.wishes and not workers.asked


def test_a_worker_that_cannot_read_kv_is_not_admitted() -> None:
    """Its tokens are right, because it computes the prompt again."""
    workers, error = proving("prefill-0", "decode", deaf="prefill-0")
    assert error is not None and "prefill-0 could not read the KV that it was handed" in str(error)
    assert workers.wishes[-1] == ("prefill-0", ("prefill",), False)


def test_a_worker_that_has_not_proved_its_own_role_is_not_flipped() -> None:
    async def main() -> None:
        cluster = SimulatedCluster(Sizes(2, 2), Times(), RouterConfig())
        workers, members = ProvingWorkers(cluster.fleet), cluster.routers[0].view.members
        fresh = replace(members.record("decode-0"), roles=(), proving=("decode",))
        with pytest.raises(BatonError, match="decode-0 has not proved the role yet"):
            await prove(workers, usable(members, fresh), fresh, ("prefill",))
        assert not workers.wishes
        await cluster.fleet.close()

    virtual_time.run(main())


def said(*ids: int, logprob: float = -0.5, top: tuple[tuple[int, float], ...] = ()) -> list[Token]:
    return [Token(each, logprob, top) for each in ids]


@pytest.mark.parametrize(("gap", "agree"), [(0.0, True), (TIE / 2, True), (TIE * 2, False)])
def test_where_two_tokens_are_as_good_as_equal_either_may_be_said(gap: float, agree: bool) -> None:
    known = [*said(1, 2), *said(3, top=((3, -0.5), (9, -0.5 - gap))), *said(4)]
    assert (parting(known, said(1, 2, 9, 7)) == "") is agree, "after the tie the texts are different ones"
    assert parting(known, said(1, 2, 8, 7)), "a token that was not among the best"
    assert parting(known, said(5, 2, 3, 4)), "an engine that tells no log-probabilities is compared bit for bit"


def test_outputs_of_other_lengths_differ() -> None:
    assert not parting(said(1, 2), said(1, 2)) and parting(said(1, 2), said(1)) and parting(said(1), said(1, 2))
