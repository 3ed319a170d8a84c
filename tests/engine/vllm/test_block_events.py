"""vLLM's block events become the changes of our keys that a router could compute from the tokens."""

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.block_key import extend_keys, root_key
from baton.engine.core.blocks import CacheChange
from baton.engine.vllm.block_events import BlockEvents

BLOCK = 2
ROOT, OTHER = root_key("model"), root_key("model", "tenant")
TOKENS = [1, 2, 3, 4, 5, 6]


def keys_of(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, BLOCK)
    return keys


def gained(*keys: bytes) -> list[CacheChange]:
    return [CacheChange(True, key) for key in keys]


def lost(*keys: bytes) -> list[CacheChange]:
    return [CacheChange(False, key) for key in keys]


def test_a_first_run_of_blocks_has_the_keys_of_its_tokens() -> None:
    assert BlockEvents(BLOCK).stored(["x", "y", "z"], None, TOKENS, ROOT.hex()) == gained(*keys_of(TOKENS))


def test_a_run_continues_after_its_parent() -> None:
    events = BlockEvents(BLOCK)
    events.stored(["x"], None, TOKENS[:2], ROOT.hex())
    assert events.stored(["y", "z"], "x", TOKENS[2:], None) == gained(*keys_of(TOKENS)[1:])


def test_the_salt_of_a_later_run_does_not_replace_its_parent() -> None:
    events = BlockEvents(BLOCK)
    events.stored(["x"], None, TOKENS[:2], ROOT.hex())
    assert events.stored(["y"], "x", TOKENS[2:4], OTHER.hex()) == gained(keys_of(TOKENS)[1])


def test_equal_tokens_after_another_root_have_other_keys() -> None:
    events = BlockEvents(BLOCK)
    first = events.stored(["x"], None, TOKENS[:2], ROOT.hex())
    second = events.stored(["x of another tenant"], None, TOKENS[:2], OTHER.hex())
    assert first == gained(*keys_of(TOKENS[:2])) and second == gained(*keys_of(TOKENS[:2], OTHER))
    assert events.removed(["x"]) == lost(*keys_of(TOKENS[:2]))


def test_blocks_without_a_known_root_or_parent_are_left_out() -> None:
    events = BlockEvents(BLOCK)
    assert events.stored(["x", "y"], None, TOKENS[:4], None) == []
    assert events.stored(["x", "y"], None, TOKENS[:4], "") == []
    assert events.stored(["z"], "y", TOKENS[4:], ROOT.hex()) == []
    assert events.removed(["x", "y", "z"]) == [] and events.cleared() == []


def test_a_block_that_is_stored_again_is_no_change() -> None:
    events = BlockEvents(BLOCK)
    events.stored(["x", "y"], None, TOKENS[:4], ROOT.hex())
    assert events.stored(["x", "y", "z"], None, TOKENS, ROOT.hex()) == gained(keys_of(TOKENS)[2])


def test_a_block_is_lost_once() -> None:
    events = BlockEvents(BLOCK)
    events.stored(["x", "y"], None, TOKENS[:4], ROOT.hex())
    assert events.removed(["y", "unknown"]) == lost(keys_of(TOKENS)[1])
    assert events.removed(["y"]) == []
    assert events.stored(["y"], "x", TOKENS[2:4], None) == gained(keys_of(TOKENS)[1]), "and may return"


def test_what_follows_a_lost_parent_is_left_out_until_the_parent_returns() -> None:
    events = BlockEvents(BLOCK)
    events.stored(["x", "y"], None, TOKENS[:4], ROOT.hex())
    events.removed(["y"])
    assert events.stored(["z"], "y", TOKENS[4:], None) == []
    events.stored(["y"], "x", TOKENS[2:4], None)
    assert events.stored(["z"], "y", TOKENS[4:], None) == gained(keys_of(TOKENS)[2])


def test_children_outlive_their_parent() -> None:
    events = BlockEvents(BLOCK)
    events.stored(["x", "y"], None, TOKENS[:4], ROOT.hex())
    events.removed(["x"])
    assert events.stored(["z"], "y", TOKENS[4:], None) == gained(keys_of(TOKENS)[2])


def test_a_cleared_cache_has_lost_every_key_once() -> None:
    events = BlockEvents(BLOCK)
    events.stored(["x", "y", "z"], None, TOKENS, ROOT.hex())
    events.removed(["y"])
    x, _, z = keys_of(TOKENS)
    assert events.cleared() in (lost(x, z), lost(z, x))
    assert events.cleared() == []
    assert events.stored(["y"], "x", TOKENS[2:4], None) == []


@given(st.data())
def test_a_listener_knows_exactly_the_keys_that_are_cached(data: st.DataObject) -> None:
    """vLLM's names are the prefixes themselves here."""
    events, cached, heard = BlockEvents(BLOCK), set[tuple[int, ...]](), set[bytes]()
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=BLOCK, max_size=4 * BLOCK)))
            names = [tokens[: i * BLOCK] for i in range(1, len(tokens) // BLOCK + 1)]
            known = next((i for i, name in enumerate(names) if name not in cached), len(names))
            parent = names[known - 1] if known else None
            changes = events.stored(names[known:], parent, list(tokens[known * BLOCK :]), ROOT.hex())
            cached |= set(names)
        else:
            names = data.draw(st.lists(st.sampled_from(sorted(cached)), unique=True)) if cached else []
            changes = events.removed(names)
            cached -= set(names)
        for change in changes:
            assert (change.key not in heard) == change.stored
            (heard.add if change.stored else heard.remove)(change.key)
        assert heard == {keys_of(list(name))[-1] for name in cached}
