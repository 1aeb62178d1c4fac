"""Tables sharded by vocabulary: how they start."""

from typing import Any

import pytest
import torch

from megatron_dspark.model import heads
from megatron_dspark.model.heads import VocabParallelTable
from tests.megatron import process_groups, tiny_config


@pytest.mark.parametrize("rows", (6, 10, 12))
def test_a_parameter_can_be_initialised_in_place(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU Megatron-Core hands over the parameter itself, with this rank's rows, outside `no_grad`."""
    kept: dict[str, Any] = {}
    monkeypatch.setattr(heads.VocabParallelEmbedding, "__init__", lambda *_, **keywords: kept.update(keywords))
    config = tiny_config()
    config.finalize()
    VocabParallelTable(12, 3, 10, config.transformer, process_groups())
    weight = torch.nn.Parameter(torch.full((rows, 3), torch.nan))
    kept["init_method"](weight)
    assert bool((weight[:10] != 0).all()) and bool(weight.isfinite().all())
    assert bool((weight[10:] == 0).all())
