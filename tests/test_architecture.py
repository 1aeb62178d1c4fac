"""Who may import whom (docs/architecture.md), read from the source."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "megatron_dspark"
# The one place where training reads what hf/ writes.
WARM_START = PACKAGE / "training" / "warm_start.py"


def imports(part: str) -> set[str]:
    """The parts of the package (first name below it) that the modules of `part` import, those inside functions too."""
    found = set()
    files = (PACKAGE / part).rglob("*.py") if (PACKAGE / part).is_dir() else [PACKAGE / f"{part}.py"]
    for file in files:
        if file == WARM_START:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("megatron_dspark.")}
            found |= {f"megatron.{name.split('.')[1]}" for name in names if name.startswith("megatron.")}
    assert found, f"{part} imports nothing at all: is it still called that?"
    return found - {part}


def test_the_verifier_shares_no_code_with_training() -> None:
    assert imports("serving") <= {"errors", "files", "sampling"}
    assert imports("sampling") <= {"errors"}


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        ("blocks", {"model", "objective", "training", "features", "data", "files"}),
        ("objective", {"model", "training", "features", "data", "files", "hf", "serving"}),
        ("data", {"model", "objective", "training", "features", "hf", "serving"}),
        ("features", {"model", "objective", "training", "hf", "serving"}),
        ("model", {"training", "data", "files", "hf", "serving"}),
        ("training", {"hf", "serving"}),
        ("targets", {"model", "objective", "training", "features", "data", "hf", "serving"}),
    ],
)
def test_data_walks_in_one_direction(part: str, forbidden: set[str]) -> None:
    if part == "blocks":
        source = (PACKAGE / "blocks.py").read_text()
        assert "import megatron" not in source and "from megatron" not in source
        return
    assert not imports(part) & forbidden
