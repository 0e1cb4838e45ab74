"""Frames of msgpack between the HTTP process and the engine.

    connection.sendall(encode(Start(config)))
    for message in frames.feed(data):                 # bytes in any portions, whole messages
        ...

A frame is the length of its body in 4 bytes, little-endian, and the body. A body is data: it cannot name code. `Start`
is sent while a start still imports: unlike the other messages, it needs no NumPy.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from atom.config import Config
from atom.runtime.metrics import DEFAULT_VERSION

HEAD = struct.Struct("<I")
MAX_FRAME = 1 << 30  # bytes; a larger frame is an error

T = TypeVar("T")


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


class Start(Message):
    """The first message to the engine."""

    config: Config
    replica: int = 0  # the engine's number among those of the server
    is_paused: bool = False  # it starts no step until it is resumed, as the others do
    weight_version: str = DEFAULT_VERSION  # the name of its weights


class Frames(Generic[T]):
    """Decodes messages from bytes that arrive in any portions."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._data = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Add bytes, and return the messages that they complete. ValueError if they are no valid frames."""
        self._data += data
        start, held, messages = 0, self._data, []
        with memoryview(held) as view:
            while len(held) - start >= HEAD.size:
                (size,) = HEAD.unpack_from(held, start)
                if size > MAX_FRAME:
                    raise ValueError(f"a frame of {size} bytes is not a message of ours")
                stop = start + HEAD.size + size
                if stop > len(held):
                    break
                messages.append(self._decoder.decode(view[start + HEAD.size : stop]))
                start = stop
        del held[:start]
        return messages


def encode(message: Message) -> bytes:
    """A message as a frame. Halves of surrogate pairs, which cannot be encoded, become U+FFFD in its texts."""
    encoder, buffer = msgspec.msgpack.Encoder(), bytearray(HEAD.size)
    try:
        encoder.encode_into(message, buffer, HEAD.size)
    except UnicodeEncodeError:
        encoder.encode_into(_replace_halves(msgspec.to_builtins(message, builtin_types=[bytes])), buffer, HEAD.size)
    HEAD.pack_into(buffer, 0, len(buffer) - HEAD.size)
    return bytes(buffer)


def _replace_halves(value: Any) -> Any:
    """A value of builtin types whose texts have no half of a surrogate pair."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list() | tuple():
            return [_replace_halves(each) for each in value]
        case dict():
            return {_replace_halves(key): _replace_halves(each) for key, each in value.items()}
    return value
