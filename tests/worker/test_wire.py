"""Messages mean the same on both sides of the wire."""

from dataclasses import astuple, fields

from baton.engine.core.kvcache import KvLayout
from baton.v1 import worker_pb2
from baton.worker.wire import pack_layout, unpack_layout

# All fields differ, and none has its own default or that of protobuf.
LAYOUT = KvLayout("model", "bfloat16", 3, 4, 5, 6, layout_version=7, parts=9, value_dim=10, stored="int8")


def test_every_layout_field_survives_the_wire() -> None:
    assert len(set(astuple(LAYOUT))) == len(fields(KvLayout))
    assert unpack_layout(worker_pb2.KvContract.FromString(pack_layout(LAYOUT).SerializeToString())) == LAYOUT


def test_a_peer_that_omits_the_number_of_parts_mismatches_in_that_field() -> None:
    contract = pack_layout(LAYOUT)
    contract.ClearField("parts")
    assert "parts" in str(LAYOUT.difference(unpack_layout(contract)))
