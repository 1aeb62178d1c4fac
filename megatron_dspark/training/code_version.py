"""Which code a checkpoint was written by."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path

import torch


@functools.cache
def code_version() -> dict[str, str | None]:
    """Return the versions that a run's numbers depend on.

    "source" is a digest of this package's files, which also tells an edited checkout from a release.
    """
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return {
        "megatron_dspark": _installed("megatron-dspark"),
        "source": digest.hexdigest()[:16],
        "megatron_core": _installed("megatron-core"),
        "torch": torch.__version__,
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
