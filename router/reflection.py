"""gRPC server reflection, v1 and v1alpha, which grpcurl and ghz use to learn the API.

grpcio-reflection offers v1alpha only. The messages of v1 have the same fields in another package, so the same servicer answers both.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

OLD, NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
METHOD = "ServerReflectionInfo"


class Symbols:
    """The default descriptor pool plus reflection v1. Here a method's name also finds the file of its service."""

    def __init__(self) -> None:
        self._known = descriptor_pool.Default()
        self._added = descriptor_pool.DescriptorPool()
        old = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(old)
        renamed = json_format.MessageToJson(old).replace("v1alpha", "v1")
        self._added.Add(json_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known, name)

    def FindFileByName(self, name: str) -> Any:
        return self._either("FindFileByName", name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """Raises KeyError for an unknown symbol."""
        try:
            return self._either("FindFileContainingSymbol", symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._either("FindServiceByName", service)
            if method not in found.methods_by_name:
                raise
            return found.file

    def _either(self, lookup: str, name: str) -> Any:
        try:
            return getattr(self._known, lookup)(name)
        except KeyError:
            return getattr(self._added, lookup)(name)


def offer(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Describes `services`, and reflection itself."""
    names = (*services, f"{OLD}.ServerReflection", f"{NEW}.ServerReflection")
    servicer = reflection.aio.ReflectionServicer(names, pool=Symbols())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{NEW}.ServerReflection", {METHOD: handler}),))
