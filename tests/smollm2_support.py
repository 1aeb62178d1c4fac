"""The demo target, converted once for all tests that need it; they are skipped where its package is not installed."""

import functools
import tempfile
from pathlib import Path

import pytest

from megatron_dspark.errors import DSparkError
from megatron_dspark.targets.smollm2 import convert_smollm2, find_smollm2_gguf


@functools.cache
def smollm2_folder() -> Path:
    """Folder of the converted target; it lives as long as the test process."""
    try:
        find_smollm2_gguf()
        import gguf  # noqa: F401
    except (DSparkError, ImportError) as error:
        pytest.skip(f"the demo target is not installed ({error})")
    _kept.append(tempfile.TemporaryDirectory())
    return convert_smollm2(Path(_kept[-1].name) / "smollm2")


_kept: list[tempfile.TemporaryDirectory] = []
