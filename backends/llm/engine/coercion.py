"""From JSON values, which clients often send as strings, to the types of a dataclass's fields."""

import json
from collections.abc import Callable
from typing import Any

from engine.config import NOT_JSON
from engine.errors import InvalidRequest, shown


def coerce(name: str, kind: Any, value: Any) -> Any:
    """`kind`: the field's type. Raises InvalidRequest that names the field and the value."""
    return _KINDS.get(kind, integer)(name, value)


def integer(name: str, value: Any) -> int:
    return int(_number(name, int, value))


def _real(name: str, value: Any) -> float:
    return float(_number(name, float, value))


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidRequest(f"{name} is {shown(value)} ({type(value).__name__}); allowed: true or false")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = _listed(value)
    for item in items:
        if not isinstance(item, str):
            raise InvalidRequest(f"{name} holds {shown(item)} ({type(item).__name__}); allowed: a string or strings")
    return tuple(items)


def _integers(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(name, item) for item in _listed(value))


def _by_token(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """An object from token ids, which JSON makes strings, to numbers."""
    value = _unpacked(value)
    if not isinstance(value, dict):
        wanted = "an object of token ids and numbers"
        raise InvalidRequest(f"{name} is {shown(value)} ({type(value).__name__}); allowed: {wanted}")
    return tuple((integer(name, token), _real(name, number)) for token, number in value.items())


def _number(name: str, kind: type[int] | type[float], value: Any) -> int | float:
    wanted = "an integer" if kind is int else "a number"
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = kind(value)
        if kind is int and isinstance(value, float) and number != value:
            raise ValueError
        return number
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} is {shown(value)} ({type(value).__name__}); allowed: {wanted}") from None


def _listed(value: Any) -> list[Any]:
    """One item stands for a list of one. So does a tensor's row that holds nothing but a list in JSON."""
    if isinstance(value, list) and len(value) == 1:
        inner = _unpacked(value[0])
        return inner if isinstance(inner, list) else value
    value = _unpacked(value)
    return value if isinstance(value, list) else [value]


def _unpacked(value: Any) -> Any:
    """Lists and objects may arrive as JSON text, since request parameters can't hold them."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            return json.loads(value)
        except NOT_JSON:
            return value
    return value


_KINDS: dict[Any, Callable[[str, Any], Any]] = {
    bool: _boolean,
    float: _real,
    float | None: _real,
    tuple[str, ...]: _strings,
    tuple[int, ...]: _integers,
    tuple[tuple[int, float], ...]: _by_token,
}
