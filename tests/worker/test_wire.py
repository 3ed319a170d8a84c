"""Messages mean the same on both sides of the wire."""

from dataclasses import astuple, fields, replace

from baton.engine.core.kvcache import DraftKv, KvLayout
from baton.v1 import worker_pb2
from baton.worker.wire import pack_layout, unpack_layout

# All fields differ, and none has its own default or that of protobuf.
DRAFT = DraftKv("draft", "float32", 11, 12, 13, 14, 15)
LAYOUT = KvLayout("model", "bfloat16", 3, 4, 5, 6, layout_version=7, parts=9, value_dim=10, stored="int8", draft=DRAFT)


def test_every_layout_field_survives_the_wire() -> None:
    assert len(set(astuple(LAYOUT))) == len(fields(KvLayout))
    assert len(set(astuple(DRAFT))) == len(fields(DraftKv))
    for layout in (LAYOUT, replace(LAYOUT, draft=None)):
        assert unpack_layout(worker_pb2.KvContract.FromString(pack_layout(layout).SerializeToString())) == layout


def test_a_peer_that_omits_the_number_of_parts_mismatches_in_that_field() -> None:
    contract = pack_layout(LAYOUT)
    contract.ClearField("parts")
    assert "parts" in str(LAYOUT.difference(unpack_layout(contract)))
