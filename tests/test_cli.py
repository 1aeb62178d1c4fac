"""The command line as a program: where help, results, refusals and the libraries' noise go."""

import errno
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from megatron_dspark import cli, cli_output
from megatron_dspark.errors import DSparkError
from tests.data_support import save_tiny_target


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "megatron_dspark", *words], capture_output=True, text=True)


@pytest.mark.parametrize("verb", ["", "prepare", "train", "export", "import", "lint", "verify"])
def test_help_can_be_piped(verb: str) -> None:
    done = run(*verb.split(), "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "Usage: " in done.stdout and (verb or "prepare") in done.stdout


def test_a_refusal_is_one_whole_sentence_and_exit_code_2() -> None:
    done = run("train", "--recipe", "recipes/[bold]none.py:f")
    assert done.returncode == 2 and done.stdout == ""
    # Square brackets are no markup.
    assert done.stderr.startswith("error: the recipe 'recipes/[bold]none.py:f' is not FILE.py:FUNCTION")
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["[1]", "enable_thinking=false", "null"])
def test_template_options_are_a_json_object(text: str, tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match=r"--template-options is .* no JSON object; write for example"):
        cli.prepare(tmp_path / "out", template_options=text)
    assert not (tmp_path / "out").exists()


def test_template_options_reach_the_conversations(tmp_path: Path) -> None:
    target, data = save_tiny_target(tmp_path / "target"), tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "b"}]}) + "\n"
            for name in "xy"
        )
    )
    words = ["--output", str(tmp_path / "out"), "--target", str(target), "--prompts", str(data), "--keep-responses"]
    words += ["--heldout-samples", "1", "--template-options", '{"enable_thinking": false}']
    assert CliRunner().invoke(cli.app, ["prepare", *words]).exit_code == 0
    records = [json.loads((tmp_path / "out" / name).read_text()) for name in ("train.jsonl", "heldout.jsonl")]
    assert [record["template_options"] for record in records] == [{"enable_thinking": False}] * 2


def test_results_are_strict_json(monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        def as_dict(self) -> dict[str, Any]:
            return {"tau": math.nan, "slots": [{"rate": math.inf}], "steps": 3}

    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    cli_output.show(Report(), True)
    text = sys.__stdout__.getvalue()
    assert json.loads(text, parse_constant=pytest.fail) == {"tau": None, "slots": [{"rate": None}], "steps": 3}


def test_a_verb_keeps_standard_output_for_its_result(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    chatty = cli_output.verb(typer.Typer())(lambda: print("a library's greeting"))
    chatty()
    assert capfd.readouterr() == ("", "a library's greeting\n")


@pytest.mark.parametrize("rank", ["0", "3"])
def test_torchrun_hears_what_any_rank_ends_with(rank: str, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    environment = {**os.environ, "RANK": rank, "TORCHELASTIC_ERROR_FILE": str(file)}
    words = [sys.executable, "-m", "megatron_dspark", "train", "--recipe", "none.py:f"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.startswith("error: ") == (rank == "0")
    assert "is not FILE.py:FUNCTION" in json.loads(file.read_text())["message"]


def test_what_the_system_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/mnt/drafter")

    monkeypatch.setattr(cli, "app", full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: [Errno 30] Read-only file system: '/mnt/drafter'; see to the permissions")
