"""Packing of one dataclass field: its type annotation decides what goes into the header and what becomes a raw frame.

Known types: str, int, float, bool, None, unions with None, tuple[X, ...], dict[str, X], Any (plain msgpack values),
nested dataclasses, numpy arrays of a declared dtype, and bytes. Arrays and bytes become one raw frame each, in field
order.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Buffer, Callable, Hashable, Iterator
from typing import Any, cast

import numpy as np

from spinf_serve.wire.errors import WireError

Frames = list[Any]
Pack = Callable[[Any, Frames], Any]
Unpack = Callable[[Any, Iterator[Buffer]], Any]
Field = tuple[Pack, Unpack]


def field_of(annotation: Any) -> Field:
    """(pack, unpack) of a type annotation. Raises TypeError for a type that the wire does not carry."""
    return _field_of(annotation)


@functools.cache
def _field_of(annotation: Hashable) -> Field:
    origin = typing.get_origin(annotation)
    if isinstance(origin, typing.TypeAliasType):  # numpy's NDArray[...]
        return field_of(origin.__value__[typing.get_args(annotation)])
    if annotation is Any:
        return _plain(lambda value: True, "a plain value")
    if annotation is float:
        return _float()
    if annotation is int:
        return _plain(lambda value: type(value) is int, "int")
    if annotation is str:
        return _text()
    if annotation is bool:
        return _plain(lambda value: type(value) is bool, "bool")
    if annotation is bytes:
        return _pack_bytes, _unpack_bytes
    if dataclasses.is_dataclass(annotation):
        return _dataclass(cast(type[Any], annotation))
    if origin is np.ndarray:
        return _array(np.dtype(typing.get_args(typing.get_args(annotation)[1])[0]))
    if origin is tuple:
        return _sequence(field_of(typing.get_args(annotation)[0]))
    if origin is dict:
        return _mapping(field_of(typing.get_args(annotation)[1]))
    if origin in (types.UnionType, typing.Union):
        (inner,) = (arm for arm in typing.get_args(annotation) if arm is not types.NoneType)
        return _optional(field_of(inner))
    raise TypeError(f"{annotation!r} cannot travel on the wire")


def _plain(accepts: Callable[[Any], bool], what: str) -> Field:
    def check(value: Any, _frames: Any) -> Any:
        if not accepts(value):
            raise WireError(f"{type(value).__name__} where {what} was expected")
        return value

    return check, check


def _text() -> Field:
    def check(value: Any, _frames: Any) -> str:
        if not isinstance(value, str):
            raise WireError(f"{type(value).__name__} where str was expected")
        return str(value)  # plain, where a library gave a subclass

    return check, check


def _float() -> Field:
    def check(value: Any, _frames: Any) -> float:
        if type(value) not in (float, int):
            raise WireError(f"{type(value).__name__} where float was expected")
        return float(value)

    return check, check


def _optional(inner: Field) -> Field:
    pack, unpack = inner

    def pack_optional(value: Any, frames: Frames) -> Any:
        return None if value is None else pack(value, frames)

    def unpack_optional(value: Any, frames: Iterator[Buffer]) -> Any:
        return None if value is None else unpack(value, frames)

    return pack_optional, unpack_optional


def _sequence(item: Field) -> Field:
    pack, unpack = item

    def pack_sequence(value: Any, frames: Frames) -> Any:
        if not isinstance(value, tuple):
            raise WireError(f"{type(value).__name__} where tuple was expected")
        return [pack(entry, frames) for entry in value]

    def unpack_sequence(value: Any, frames: Iterator[Buffer]) -> Any:
        if not isinstance(value, list):
            raise WireError(f"{type(value).__name__} where a list was expected")
        return tuple(unpack(entry, frames) for entry in value)

    return pack_sequence, unpack_sequence


def _mapping(item: Field) -> Field:
    def convert(side: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def convert_mapping(value: Any, frames: Any) -> Any:
            if not isinstance(value, dict) or not all(type(key) is str for key in value):
                raise WireError(f"{type(value).__name__} where a map with text keys was expected")
            return {key: side(entry, frames) for key, entry in value.items()}

        return convert_mapping

    return convert(item[0]), convert(item[1])


def _dataclass(cls: type[Any]) -> Field:
    hints = typing.get_type_hints(cls)
    members = {field.name: field_of(hints[field.name]) for field in dataclasses.fields(cls)}

    def pack_dataclass(value: Any, frames: Frames) -> Any:
        if type(value) is not cls:
            raise WireError(f"{type(value).__name__} where {cls.__name__} was expected")
        return {name: _named(name, pack, getattr(value, name), frames) for name, (pack, _) in members.items()}

    def unpack_dataclass(value: Any, frames: Iterator[Buffer]) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{type(value).__name__} where the fields of {cls.__name__} were expected")
        if value.keys() != members.keys():
            missing, extra = sorted(members.keys() - value.keys()), sorted(map(str, value.keys() - members.keys()))
            raise WireError(f"{cls.__name__}: missing fields {missing}, unknown fields {extra}")
        return cls(**{name: _named(name, unpack, value[name], frames) for name, (_, unpack) in members.items()})

    return pack_dataclass, unpack_dataclass


def _named(name: str, side: Callable[[Any, Any], Any], value: Any, frames: Any) -> Any:
    try:
        return side(value, frames)
    except WireError as error:
        raise WireError(f"{name}: {error}") from None


def _next_frame(frames: Iterator[Buffer], size: int) -> Buffer:
    frame = next(frames, None)
    if frame is None:
        raise WireError("its frame is missing")
    length = memoryview(frame).nbytes
    if length != size:
        raise WireError(f"a frame of {length} bytes where {size} were announced")
    return frame


def _pack_bytes(value: Any, frames: Frames) -> Any:
    if not isinstance(value, bytes):
        raise WireError(f"{type(value).__name__} where bytes was expected")
    frames.append(value)
    return len(value)


def _unpack_bytes(value: Any, frames: Iterator[Buffer]) -> bytes:
    if type(value) is not int or value < 0:
        raise WireError("the length of a byte string was expected")
    return bytes(_next_frame(frames, value))


def _array(dtype: np.dtype[Any]) -> Field:
    little = dtype.newbyteorder("<")

    def pack_array(value: Any, frames: Frames) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype != dtype:
            raise WireError(f"{getattr(value, 'dtype', type(value).__name__)} where {dtype} was expected")
        flat = np.ascontiguousarray(value, dtype=little).reshape(-1)
        frames.append(memoryview(flat).cast("B") if flat.size else b"")
        return [little.str, list(value.shape)]

    def unpack_array(value: Any, frames: Iterator[Buffer]) -> Any:
        match value:
            case [str() as name, [*shape]] if all(type(size) is int and size >= 0 for size in shape):
                pass
            case _:
                raise WireError("an array header [dtype, shape] was expected")
        if name != little.str:
            raise WireError(f"an array of {name!r} where {little.str!r} was expected")
        count = 1
        for size in shape:
            count *= size
        array = np.frombuffer(_next_frame(frames, count * little.itemsize), dtype=little).reshape(shape)
        # A received frame may start at any byte; only then is a copy needed.
        return array if array.flags.aligned else array.copy()

    return pack_array, unpack_array
