"""Files and folders that appear whole or not at all, and JSON that every reader accepts."""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from megatron_dspark.errors import DSparkError


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder beside `path`; on success flush and rename it over `path`.

    A reader sees the old file or the complete new one. When the body raises, the temporary folder is removed and
    `path` is left as it was. A folder, because some libraries (safetensors) write a temporary file of their own
    beside the one that they are given: it is found and removed with the rest after a kill.
    """
    path = Path(path)
    folder = _temporary(path)
    folder.mkdir(exist_ok=True)
    temporary = folder / path.name
    try:
        yield temporary
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success rename it to `path`.

    Raises:
        DSparkError: `path` already holds something: a finished result is never overwritten silently.
    """
    path = Path(path)
    refuse_taken(path)
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        # An empty folder gives way; what another process has finished meanwhile does not.
        with contextlib.suppress(OSError):
            path.rmdir()
        refuse_taken(path)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_taken(path: Path) -> bool:
    """Whether `path` is a file, or a folder that holds something."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def refuse_taken(path: Path) -> None:
    """Raise DSparkError when `path` is taken: a finished result is never overwritten silently."""
    if is_taken(path):
        raise DSparkError(f"{path} already exists and is not empty; choose another folder or remove it first")


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds; what is gone already, or cannot be removed, is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _temporary(path: Path) -> Path:
    """The folder in which this process writes `path` until it is whole. What killed processes left of it is removed.

    The name says which process writes, and where its number means something: on another machine of a shared file
    system, or in another container, the same number is somebody else. Leftovers from there are not touched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d+)-{_numbering()}\.partial")
    for other in path.parent.iterdir():
        match = pattern.fullmatch(other.name)
        if match and not psutil.pid_exists(int(match.group(1))):
            remove(other)
    return path.with_name(f".{path.name}.{os.getpid()}-{_numbering()}.partial")


@functools.cache
def _numbering() -> str:
    """A word that two processes share only if they see the same process numbers: one boot of one machine, one
    container."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        parts.append(boot.read_text().strip())
    if namespace.is_symlink():
        parts.append(os.readlink(namespace))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def require_file(path: str | Path, what: str, remedy: str) -> None:
    """Refuse a path that is no file.

    Args:
        path: the file.
        what: what the file is, for the error message ("the training data").
        remedy: what to do about it.

    Raises:
        DSparkError: it does not exist, or is something else; the sentence says which.
    """
    path = Path(path)
    if not path.is_file():
        is_what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise DSparkError(f"{what} {path} {is_what}; {remedy}")


def require_folder(path: str | Path, what: str, remedy: str) -> None:
    """Refuse a path that is no folder; see `require_file`."""
    path = Path(path)
    if not path.is_dir():
        raise DSparkError(f"{what} {path} {'is no folder' if path.exists() else 'does not exist'}; {remedy}")


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def require_writable(folder: str | Path, what: str) -> None:
    """Refuse a folder in which nothing can be written, or that cannot be made; see `require_file`."""
    place = existing(Path(folder))
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return
    reason = "its file system is mounted read-only" if os.statvfs(place).f_flag & os.ST_RDONLY else "permission denied"
    reason = reason if place.is_dir() else "it is no folder"
    raise DSparkError(f"{what} {folder} cannot be written: {place} refuses that ({reason}); choose another output")


def finite(value: Any) -> Any:
    """`value` with None for every NaN and infinity in it, for which JSON has no other word."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as JSON in the strict sense: a metric that was not measured (NaN) is null.

    Raises:
        TypeError: `value` holds something that JSON does not know.
    """
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented, strict JSON (see `json_text`), atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json_text(value, indent=2) + "\n", encoding="utf-8")


def write_json_lines(path: str | Path, values: Iterable[Any]) -> None:
    """Write one line of strict JSON for each of `values`, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text("".join(f"{json_text(value)}\n" for value in values), encoding="utf-8")


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        what: what the file is, for the error message ("the draft's config").

    Raises:
        DSparkError: the file is missing or is not JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DSparkError(f"{what} was expected at {path}, and there is no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DSparkError(f"{what} at {path} is not valid JSON ({error})") from None


def save_tensors(tensors: Mapping[str, Any], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write safetensors that others may read as they may read any new file here; the library would keep them out."""
    from safetensors.torch import save_file

    path = Path(path)
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
