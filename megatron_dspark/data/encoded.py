"""Conversations encoded once a machine, and mapped into memory by every rank and every later start.

Encoding a million conversations takes CPU hours and, as Python objects, more memory than a node has for all its ranks.
The Arrow file that `datasets` keeps of them in its cache folder (HF_DATASETS_CACHE) is read where a sample is asked
for; it is made anew when the conversations, the tokenizer, its template or `max_length` differ.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import datasets
import numpy
import pyarrow
import pyarrow.compute
import torch
from datasets.exceptions import DatasetGenerationError

from megatron_dspark.data.chat import ChatSample, encode_messages, load_tokenizer
from megatron_dspark.data.messages import open_conversations, parse_line, refuse_repeated, without_conversations
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, sha256
from megatron_dspark.targets.fingerprint import digest_of, sample_digest
from megatron_dspark.targets.folder import TOKENIZER_FILES

# Raise it when the ids or the mask of a conversation change.
_ENCODING = 1
# From so much text on, a process of its own pays.
_BYTES_PER_PROCESS = 2 * 2**20
_SAMPLE_COLUMNS = ("id", "input_ids", "loss_mask", "digest")
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC)
# What an encoded file depends on besides its content.
_LIBRARIES = ("megatron-dspark", "tokenizers", "transformers", "jinja2")


class EncodedSamples(Sequence[ChatSample]):
    """The encoded conversations of a file in its order, held by none of the processes that read them."""

    def __init__(self, table: Any, folder: Path, numbers: range | None = None) -> None:
        """Wrap what `load_samples` made.

        Args:
            table: Arrow table of id, input_ids, loss_mask and digest; a sample is compared with its digest when read.
            folder: where it is kept, for people.
            numbers: its rows; None for all.
        """
        self._table, self._folder = table, folder
        self._ids, self._tokens, self._masks, self._digests = map(table.column, _SAMPLE_COLUMNS)
        self._numbers = range(table.num_rows) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> ChatSample: ...
    @overload
    def __getitem__(self, index: slice) -> "EncodedSamples": ...
    def __getitem__(self, index: int | slice) -> "ChatSample | EncodedSamples":
        if isinstance(index, slice):
            return EncodedSamples(self._table, self._folder, self._numbers[index])
        number = self._numbers[index]
        sample = ChatSample(
            self._ids[number].as_py(),
            # A copy each: the file is mapped read-only.
            torch.from_numpy(self._tokens[number].values.to_numpy().astype(numpy.int64)),
            torch.from_numpy(self._masks[number].values.to_numpy(zero_copy_only=False).copy()),
        )
        if sample_digest(parts_of_sample(sample)) != self._digests[number].as_py():
            raise _damaged(self._folder, f"the sample {sample.sample_id!r} is not what was encoded")
        return sample

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return pyarrow.compute.list_value_length(self._rows("input_ids")).to_pylist()

    @property
    def loss_tokens(self) -> int:
        """Tokens that the target emitted, over all samples."""
        return pyarrow.compute.sum(pyarrow.compute.list_flatten(self._rows("loss_mask"))).as_py() or 0

    @property
    def fingerprint(self) -> str:
        """SHA-256 over identifiers, ids and masks in order, as a feature cache's manifest has it."""
        state = hashlib.sha256()
        for digest in self._rows("digest"):
            state.update(digest.as_py())
        return state.hexdigest()

    def _rows(self, column: str) -> Any:
        rows = self._table.column(column)
        return rows if len(self) == len(rows) else rows.take(list(self._numbers))


def load_samples(path: str | Path, target_folder: str | Path, max_length: int) -> EncodedSamples:
    """Encode every conversation of a file with the tokenizer of `target_folder`, or find what was encoded before.

    Every rank of a job may call it: one of each machine encodes, with all its cores, and the others wait.

    Raises:
        DSparkError: as `load_tokenizer`, `parse_line` and `encode_messages`; an id occurs twice; a token id lies
            outside the target's vocabulary; or the cache folder cannot be written.
    """
    path, folder = Path(path), Path(target_folder)
    load_tokenizer(folder)
    vocabulary = read_json(folder / "config.json", "the target's config").get("vocab_size")
    parts = _parts(path, len(os.sched_getaffinity(0)))
    settings = {"path": str(path), "folder": str(folder), "max_length": max_length, "vocabulary": vocabulary}
    identity = _identity(**settings)
    kept = _kept(identity)
    with tempfile.TemporaryDirectory(prefix="dspark-") as told:
        try:
            dataset = _dataset(parts, {**settings, "told": told}, identity)
        except (DatasetGenerationError, ValueError, OSError) as error:
            refusals = sorted(Path(told).iterdir(), key=lambda part: int(part.name))
            if refusals:
                raise DSparkError(refusals[0].read_text()) from None
            if kept is not None and getattr(error, "errno", None) not in _NOT_WRITABLE:
                raise _damaged(kept, str(error).splitlines()[0]) from error
            # Of what fails in another process only the text arrives.
            reason = re.search(r"\[Errno \d+\] .*", "".join(traceback.format_exception(error)))
            if reason is None:
                raise
            raise DSparkError(
                f"the encoded conversations of {path} could not be kept in {datasets.config.HF_DATASETS_CACHE} "
                f"({reason.group()}); make room there, or set HF_DATASETS_CACHE to another folder that can be written"
            ) from error
    table = dataset.data.table
    if pyarrow.compute.count_distinct(table.column("id")).as_py() < table.num_rows:
        refuse_repeated(path, zip(table.column("id").to_pylist(), table.column("line").to_pylist(), strict=True))
    return EncodedSamples(table, Path(dataset.cache_files[0]["filename"]).parents[1])


def _kept(identity: str) -> Path | None:
    """Where what was encoded is kept; None before it is complete."""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    return next((path.parents[1] for path in cache.glob(f"*/*{identity}/*/dataset_info.json")), None)


def _damaged(folder: Path, what: str) -> DSparkError:
    return DSparkError(
        f"the encoded conversations in {folder} are damaged ({what}); remove that folder, and they are encoded again"
    )


def _dataset(parts: list[tuple[int, int, int]], settings: dict[str, Any], identity: str) -> datasets.Dataset:
    with _progress_in_terminals_alone(), _children_end_with_this_process():
        return datasets.Dataset.from_generator(
            _encode,
            features=datasets.Features(
                {
                    "id": datasets.Value("string"),
                    "input_ids": datasets.List(datasets.Value("int32")),
                    "loss_mask": datasets.List(datasets.Value("bool")),
                    "digest": datasets.Value("binary"),
                    "line": datasets.Value("int64"),
                }
            ),
            gen_kwargs={"parts": parts, **settings},
            num_proc=len(parts) if len(parts) > 1 else None,
            fingerprint=identity,
            cache_dir=str(datasets.config.HF_DATASETS_CACHE),
        )


def parts_of_sample(sample: ChatSample) -> tuple[str, bytes, bytes]:
    """What a sample's digest is made of: its identifier, ids (little-endian int32) and mask (bytes of 0 and 1)."""
    return (
        sample.sample_id,
        sample.input_ids.numpy().astype("<i4").tobytes(),
        sample.loss_mask.numpy().astype("u1").tobytes(),
    )


def _encode(
    parts: list[tuple[int, int, int]],
    path: str,
    folder: str,
    max_length: int,
    vocabulary: int | None,
    told: str,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of parts (first byte, end, first line's number) of a file; runs in processes of `datasets`.

    The sentence of a refusal is left in the folder `told`, by the number of its part's first line.
    """
    try:
        for start, stop, number in parts:
            yield from _encode_part(start, stop, number, path, folder, max_length, vocabulary)
    except DSparkError as error:
        # An exception of a process loses what caused it on its way to the parent.
        (Path(told) / str(number)).write_text(str(error))
        raise


def _encode_part(
    start: int, stop: int, number: int, path: str, folder: str, max_length: int, vocabulary: int | None
) -> Iterator[dict[str, Any]]:
    tokenizer = load_tokenizer(folder)
    with open(path, "rb") as file:
        file.seek(start)
        while file.tell() < stop:
            line = file.readline()
            if line.strip():
                sample = encode_messages(tokenizer, parse_line(line, f"{path} line {number}"), max_length)
                _refuse_foreign_tokens(sample, folder, vocabulary)
                yield {
                    "id": sample.sample_id,
                    "input_ids": sample.input_ids.numpy(),
                    "loss_mask": sample.loss_mask.numpy(),
                    "digest": sample_digest(parts_of_sample(sample)),
                    "line": number,
                }
            number += 1


def _refuse_foreign_tokens(sample: ChatSample, folder: str, vocabulary: int | None) -> None:
    largest = int(sample.input_ids.max())
    if vocabulary is not None and largest >= vocabulary:
        raise DSparkError(
            f"the tokenizer in {folder} gives token id {largest} and the model's vocab_size is {vocabulary}; "
            "use the tokenizer that belongs to the target"
        )


def _parts(path: Path, count: int) -> list[tuple[int, int, int]]:
    """Split a file at line ends into at most `count` parts: (first byte, end, number of the first line).

    Raises:
        DSparkError: the file is missing or holds nothing.
    """
    parts, start, first, anything = [], 0, 1, False
    with open_conversations(path) as file:
        size, stop = os.fstat(file.fileno()).st_size, 0
        count = max(1, min(count, size // _BYTES_PER_PROCESS))
        for number, line in enumerate(file, start=1):
            anything = anything or bool(line.strip())
            stop += len(line)
            if stop >= size * (len(parts) + 1) / count:
                parts.append((start, stop, first))
                start, first = stop, number + 1
    if not anything:
        raise without_conversations(path)
    return parts


def _identity(path: str, folder: str, max_length: int, vocabulary: int | None) -> str:
    files = {path.name: sha256(path) for path in map(Path(folder).joinpath, TOKENIZER_FILES) if path.is_file()}
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return digest_of([_ENCODING, sha256(path), files, max_length, vocabulary, versions])


@contextlib.contextmanager
def _progress_in_terminals_alone() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    if shown and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


# The process whose children are of `datasets` just now.
_parent: int | None = None


@contextlib.contextmanager
def _children_end_with_this_process() -> Iterator[None]:
    """Those of `datasets` would wait for work for ever when this process is killed."""
    global _parent
    _parent = os.getpid()
    try:
        yield
    finally:
        _parent = None


def _end_with_parent() -> None:
    if _parent is not None:
        threading.Thread(target=_end_when_gone, args=(_parent,), daemon=True).start()


def _end_when_gone(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


os.register_at_fork(after_in_child=_end_with_parent)
