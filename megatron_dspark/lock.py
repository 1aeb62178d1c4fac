"""One job a folder: a lock that ends with the process that holds it."""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_dspark.errors import DSparkError

LOCK_FILE = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def folder_lock(folder: str | Path, *, keep_file: bool = True) -> Iterator[bool]:
    """Hold `folder` for this process, and make it where it does not exist.

    The kernel keeps the lock (flock), so that a killed process, or a machine that went down, leaves none behind. The
    file means nothing by itself.

    Args:
        folder: the folder.
        keep_file: leave the file; False removes it at the end, for a folder that is to hold nothing else.

    Yields:
        Whether the file system has such locks; without them nothing is held.

    Raises:
        DSparkError: another process holds it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
            # The holder may have ended, and removed the file, between our opening and our locking it.
            if not os.path.samestat(os.fstat(handle), os.stat(path)):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise DSparkError(
                f"{folder} is being written by {_holder(path)}; wait for its end, or choose another output"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            held = False
        if held:
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode())
            # A process forked to write a checkpoint would hold the lock until its own end.
            _held.add(handle)
        try:
            yield held
        finally:
            if not keep_file:
                # Before the lock ends: what is removed is ours.
                path.unlink(missing_ok=True)
    finally:
        _held.discard(handle)
        os.close(handle)


_held: set[int] = set()


def _close_in_child() -> None:
    for handle in _held:
        # The child's copy alone is closed: closing one copy of a descriptor does not unlock.
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['process']} on {holder['machine']}"
    except (OSError, ValueError, KeyError):
        return "another process"
