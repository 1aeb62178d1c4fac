"""The answers of a generation job that is not finished: a file that a killed job leaves and its successor continues."""

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_dspark.errors import DSparkError

_FORMAT = 1


class PartialFile:
    """`<output>.partial`: a header line, then one line an answer, each with the number of its unit.

    Only whole units count (see `generate.py`). A line that a kill tore, and the answers of units that were not
    complete, are dropped when the file is opened again. One process at a time holds it.
    """

    def __init__(self, output: Path, header: dict[str, Any], unit_size: int) -> None:
        """Name the file of `output`.

        Args:
            output: the finished file's path.
            header: what decides the answers; a file with another header is refused.
            unit_size: prompts per unit for a new file; a file that exists keeps its own.
        """
        self.path = output.with_name(output.name + ".partial")
        self.header = {"format": _FORMAT, **header}
        self.unit_size = unit_size
        self._entries: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def __enter__(self) -> "PartialFile":
        """Open and read.

        Raises:
            DSparkError: another process holds the file, it belongs to other settings, or it is damaged.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def finished(self, unit_lengths: Iterable[int]) -> list[list[dict[str, Any]]]:
        """Entries of every complete unit; the others' are taken out of the file, to be made again."""
        lengths = list(unit_lengths)
        whole = {unit: lines for unit, lines in self._entries.items() if len(lines) == lengths[unit]}
        self._rewrite(whole)
        return list(whole.values())

    def append(self, unit: int, entry: dict[str, Any]) -> None:
        """Add one answer of `unit`."""
        self._file.write(_line({"unit": unit, **entry}))
        self._file.flush()

    def remove(self) -> None:
        """Delete the file: its answers are in the finished one."""
        self.path.unlink()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder may have replaced the file between our opening and our locking it.
            mine = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise DSparkError(f"{self.path} is being written by another process; wait for it or end it")

    def _read(self) -> None:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        lines.pop()  # what follows the last newline: nothing, or a torn line
        if not lines:
            return
        header = self._parse(lines[0], 1)
        self.unit_size = header.pop("unit_size", None)
        _refuse_difference(self.path, header, self.header)
        for number, line in enumerate(lines[1:], start=2):
            entry = self._parse(line, number)
            self._entries[entry.pop("unit")].append(entry)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            return json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise DSparkError(f"{self.path} line {number} is damaged; remove the file to begin anew") from None

    def _rewrite(self, units: dict[int, list[dict[str, Any]]]) -> None:
        """Replace the content by whole units. The old content stays readable until the new one is on disk."""
        lines = [_line({**self.header, "unit_size": self.unit_size})]
        lines += [_line({"unit": unit, **entry}) for unit, entries in units.items() for entry in entries]
        replacement = self.path.with_name(self.path.name + ".new")
        with open(replacement, "wb") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        old = self._file
        self._file = open(replacement, "a+b")  # noqa: SIM115 (closed by __exit__)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.replace(replacement, self.path)
        old.close()


def _refuse_difference(path: Path, found: dict[str, Any], expected: dict[str, Any], prefix: str = "") -> None:
    for name in {**expected, **found}:
        old, new = found.get(name), expected.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            _refuse_difference(path, old, new, f"{prefix}{name}.")
        elif old != new:
            raise DSparkError(
                f"{path} was begun with {prefix}{name} {old!r}, now it is {new!r}; restore it to continue, or remove "
                "the file to begin anew"
            )


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
