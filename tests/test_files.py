"""Files appear whole, what a killed process leaves is cleaned up by the next, and JSON is strict."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import atomic_file, atomic_folder, finite, json_text, read_json, write_json, write_json_lines

# A process that is in the middle of writing a file and a folder.
WRITER = """
import sys, time
from megatron_dspark.files import atomic_file, atomic_folder
with atomic_folder(sys.argv[1] + "/folder") as folder, atomic_file(sys.argv[1] + "/file") as file:
    (folder / "half").write_text("half")
    file.write_text("half")
    file.with_name(".tmpA1b2C3").write_text("what safetensors writes first, beside the file that it is given")
    print("writing", flush=True)
    time.sleep(600)
"""


@contextmanager
def writing(parent: Path) -> Iterator[subprocess.Popen]:
    """A process inside its `atomic_file` and `atomic_folder`; killed, and gone, at the end."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(parent)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"writing\n"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def partials(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir() if path.name.endswith(".partial")}


def write_both(parent: Path) -> None:
    with atomic_file(parent / "file") as file:
        file.write_text("whole")
    with atomic_folder(parent / "folder") as folder:
        (folder / "whole").write_text("whole")


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    with writing(tmp_path):
        assert len(partials(tmp_path)) == 2
    assert {path.name for path in tmp_path.iterdir()} == partials(tmp_path) and len(partials(tmp_path)) == 2
    write_both(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "whole" and (tmp_path / "folder" / "whole").exists()


def test_a_process_that_lives_and_other_machines_are_left_alone(tmp_path: Path) -> None:
    with writing(tmp_path) as process:
        own = partials(tmp_path)
        assert all(f".{process.pid}-" in name for name in own)
        # The same numbers seen from another machine, of a process that is not running here; and another file's.
        foreign = {".file.4194304-00000000.partial", ".folder.4194304-00000000.partial"}
        dead = next(name for name in own if name.startswith(".file.")).replace(f".{process.pid}-", ".4194304-")
        foreign |= {dead.replace(".file.", ".file.bak.")}
        for name in (*foreign, dead):
            (tmp_path / name).mkdir()
        write_both(tmp_path)
        assert partials(tmp_path) == own | foreign


def test_nothing_appears_when_the_body_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for way in (atomic_file, atomic_folder):
        with pytest.raises(KeyError), way(tmp_path / ("file" if way is atomic_file else "folder")) as path:
            (path if way is atomic_file else path / "x").write_text("new")
            raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "x").write_text("x")
    with pytest.raises(DSparkError, match="already exists and is not empty"), atomic_folder(tmp_path / "folder"):
        pass
    assert os.listdir(tmp_path / "folder") == ["x"]


def strict(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    value = {"tau": math.nan, "slots": [1.5, math.inf, (-math.inf, 2)], "deep": {"x": [{"y": math.nan}]}, "é": "é"}
    expected = {"tau": None, "slots": [1.5, None, [None, 2]], "deep": {"x": [{"y": None}]}, "é": "é"}
    assert strict(json_text(value)) == finite(value) == expected
    write_json(tmp_path / "a.json", value)
    assert strict((tmp_path / "a.json").read_text()) == expected == read_json(tmp_path / "a.json", "it")
    write_json_lines(tmp_path / "a.jsonl", [value, value])
    assert [strict(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [expected] * 2
    with pytest.raises(TypeError):
        write_json(tmp_path / "b.json", {"path": Path("x")})
    assert not (tmp_path / "b.json").exists()
