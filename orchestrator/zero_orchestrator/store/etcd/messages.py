"""etcd's messages and stubs, built at run time for the protobuf version that is installed.

etcd3 0.12 ships message modules generated in 2019, which protobuf 4 and later refuse to load. This
package ships the API as a compiled descriptor (`etcd_api.binpb`; `etcd_api.proto` names the
command that compiles it). `install` builds the message classes from the descriptor and registers
them as `etcd3.etcdrpc`, before etcd3 is imported.
"""

from __future__ import annotations

import sys
from importlib import resources
from types import ModuleType
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_STANDS_FOR = "etcd3.etcdrpc"
_PACKAGE = "etcdserverpb"


def install() -> None:
    """Register the messages for `import etcd3`; does nothing if etcd3 is already imported."""
    if _STANDS_FOR not in sys.modules:
        sys.modules[_STANDS_FOR] = build()


def build() -> ModuleType:
    """A module with every message class and, for each service, a `<service>Stub` class."""
    data = resources.files(__package__).joinpath("etcd_api.binpb").read_bytes()
    (api,) = FileDescriptorSet.FromString(data).file
    module = ModuleType(_STANDS_FOR, __doc__)
    pool = DescriptorPool()  # and not the default one, in which another etcd client may be
    pool.AddSerializedFile(api.SerializeToString())
    vars(module).update(
        {
            message.name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}"))
            for message in api.message_type
        }
    )
    for service in api.service:
        stub = _stub_class(service.name, service.method, vars(module))
        setattr(module, stub.__name__, stub)
    return module


def _stub_class(service: str, methods: Any, classes: dict[str, Any]) -> type:
    """The class that generated code would have: `Stub(channel).Method(request, timeout)`."""

    def bind(self: Any, channel: Any) -> None:
        for method in methods:
            # gRPC names its four kinds of calls by who streams: `unary_stream`, for example.
            sides = (method.client_streaming, method.server_streaming)
            kind = "_".join("stream" if streams else "unary" for streams in sides)
            multi_callable = getattr(channel, kind)(
                f"/{_PACKAGE}.{service}/{method.name}",
                request_serializer=_class_of(method.input_type, classes).SerializeToString,
                response_deserializer=_class_of(method.output_type, classes).FromString,
            )
            setattr(self, method.name, multi_callable)

    return type(f"{service}Stub", (), {"__init__": bind})


def _class_of(full_name: str, classes: dict[str, Any]) -> Any:
    return classes[full_name.rpartition(".")[2]]
