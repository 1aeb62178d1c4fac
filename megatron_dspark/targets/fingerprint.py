"""What makes two targets the same: every byte of their weights, their config, tokenizer and chat template."""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, write_json

_REMEMBERED = "fingerprints.json"
# Keys of a config.json that change nothing of what the model computes.
_IDLE_CONFIG_KEYS = ("transformers_version", "_name_or_path", "use_cache")
# The parts of tokenizer.json that decide which ids a text becomes.
_TOKENIZER_PARTS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")


def weights_fingerprint(folder: str | Path, *, remember: bool = True) -> str:
    """SHA-256 over every byte of every tensor in a folder's safetensors, whatever file or order they stand in.

    Digests are remembered for each file (its size, inode and times of change) in the user's cache folder, so that a
    large target is read once and not at every start.

    Args:
        folder: a Hugging Face folder.
        remember: False reads everything again, for a check that trusts nothing.

    Raises:
        DSparkError: a file is not a whole safetensors file.
    """
    digests: dict[str, str] = {}
    known = _Remembered() if remember else None
    for file in sorted(Path(folder).glob("*.safetensors")):
        found = None if known is None else known.get(file)
        if found is None:
            found = _tensor_digests(file)
            if known is not None:
                known.put(file, found)
        digests.update(found)
    return digest_of(sorted(digests.items()))


def config_fingerprint(raw: dict[str, Any]) -> str:
    """SHA-256 over a target's config.json, without the keys that change nothing."""
    return digest_of({key: value for key, value in raw.items() if key not in _IDLE_CONFIG_KEYS})


def tokenizer_fingerprint(folder: str | Path, tokenizer: Any) -> str:
    """SHA-256 over what decides the ids of a text: tokenizer.json's rules, or the vocabulary where there is none."""
    path = Path(folder) / "tokenizer.json"
    if path.is_file():
        rules = read_json(path, "the target's tokenizer")
        return digest_of({part: rules.get(part) for part in _TOKENIZER_PARTS})
    return digest_of([sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)])


def chat_template_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the chat template that a conversation is written with."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 over `value` as JSON in one canonical form: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_digests(file: Path) -> dict[str, str]:
    """name → SHA-256 over the tensor's dtype, shape and bytes."""
    try:
        with open(file, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                if max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(view) - 8 - length:
                    raise ValueError("its length is not what its header says")

                def digest(entry: dict[str, Any]) -> str:
                    start, stop = (8 + length + offset for offset in entry["data_offsets"])
                    state = hashlib.sha256(f"{entry['dtype']}{entry['shape']}".encode())
                    with view[start:stop] as tensor:
                        state.update(tensor)
                    return state.hexdigest()

                # hashlib lets other threads run while it reads.
                with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
                    return dict(zip(header, pool.map(digest, header.values()), strict=True))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise DSparkError(f"{file} is not a whole safetensors file ({error}); copy the target again") from None


class _Remembered:
    """Digests of files that have not changed since, in the user's cache folder; without one nothing is remembered."""

    def __init__(self) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._path = Path(home) / "megatron_dspark" / _REMEMBERED
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            self._known: dict[str, Any] = values if isinstance(values, dict) else {}
        except (OSError, ValueError):
            self._known = {}

    def get(self, file: Path) -> dict[str, str] | None:
        entry = self._known.get(str(file.resolve()))
        return entry["tensors"] if entry and entry.get("state") == _state(file) else None

    def put(self, file: Path, tensors: dict[str, str]) -> None:
        self._known[str(file.resolve())] = {"state": _state(file), "tensors": tensors}
        try:
            write_json(self._path, {name: entry for name, entry in self._known.items() if os.path.exists(name)})
        except OSError:
            return  # a read-only home only costs the time to read again


def _state(file: Path) -> list[int]:
    # The time of the inode's own change cannot be set back by copying or touching a file.
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def data_fingerprint(samples: Iterable[tuple[str, bytes, bytes]]) -> str:
    """SHA-256 over samples in order: (identifier, token ids as little-endian int32, loss mask as bytes of 0 and 1)."""
    state = hashlib.sha256()
    for parts in samples:
        state.update(sample_digest(parts))
    return state.hexdigest()


def sample_digest(parts: Sequence[str | bytes]) -> bytes:
    """SHA-256 over the parts' lengths and bytes, so that no two different samples read the same."""
    state = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        state.update(struct.pack("<Q", len(content)))
        state.update(content)
    return state.digest()
