"""Paths of this machine inside a JSON value: found, and cut to their last part."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# A home folder, a Windows drive, a file URL, or an absolute path: one of two parts or more inside a text, or a text
# that is nothing else. A lone "/word" inside a text is left alone: "tokens /s" is not a path.
_LOCAL_PATH = re.compile(
    r"(?:(?<=[\s\"'=:,(\[])|^)"
    r"(?:(?:file://)?(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)+/?|[A-Za-z]:\\[^\s\"']*|(?<![^\n])/[\w.@+-]+/?$)"
)


def local_paths(value: Any, place: str = "top level") -> Iterator[tuple[str, str]]:
    """Every path of this machine inside the strings of a JSON value, with the keys that lead to it."""
    if isinstance(value, str):
        for match in _LOCAL_PATH.finditer(value):
            yield place, match.group()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from local_paths(inner, f"{place} > {key}" if place != "top level" else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from local_paths(inner, f"{place} > {number}")


def without_local_paths(value: Any) -> Any:
    """The same JSON value with every path of this machine cut to its last part."""
    if isinstance(value, str):
        return _LOCAL_PATH.sub(lambda match: re.split(r"[\\/]", match.group().rstrip("/\\"))[-1], value)
    if isinstance(value, Mapping):
        return {key: without_local_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_local_paths(inner) for inner in value]
    return value
