"""The sequential heads against the reference, gradients included; and how tables sharded by vocabulary start."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from safetensors.torch import load_file

from megatron_dspark.model import heads
from megatron_dspark.model.heads import MARKOV_HEADS, VocabParallelTable
from tests.distributed import RankPool
from tests.megatron import GOLDEN, process_groups, shard, tiny_config


def errors(rank: int, size: int, kind: str) -> dict[str, float]:
    """Largest differences of a training head's logits and gradients from the reference, on a tensor-parallel rank."""
    golden = load_file(GOLDEN / "heads.safetensors")
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 8}
    config = tiny_config(size, transformer=small, vocab_size=32, mask_token_id=31)
    config.finalize()
    groups = process_groups(size)
    head = MARKOV_HEADS[kind](config.transformer, 32, 32, 8, groups)

    def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return shard(tensor, 0, rank, size) if "markov_w" in name else tensor

    def named(group: str) -> dict[str, torch.Tensor]:
        prefix = f"{kind}/{group}/"
        return {name.removeprefix(prefix): tensor for name, tensor in golden.items() if name.startswith(prefix)}

    head.load_state_dict({name: own(name, tensor) for name, tensor in named("param").items()})
    hidden = golden["in/hidden_states"].flatten(0, 1).requires_grad_()
    latent = head.latent(hidden, head.embed(golden["in/prev_token_ids"].flatten(0, 1)))
    # As the objective does: every rank has the latent's gradient from its own part of the vocabulary, and sums.
    rows = copy_to_tensor_model_parallel_region(latent, group=groups.tp) @ head.markov_w2.weight.T
    rows.backward(shard(golden["in/cotangent"].flatten(0, 1), -1, rank, size))

    logits = shard((golden[f"{kind}/out/logits"] - golden["in/base_logits"]).flatten(0, 1), -1, rank, size)
    gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
    # The vanilla head does not read the hidden states.
    reached = {} if hidden.grad is None else {"hidden_states": hidden.grad.unflatten(0, (2, 3))}
    found = {"logits": rows.detach(), **reached, **gradients}
    expected = {"logits": logits, **{name: own(name, tensor) for name, tensor in named("grad").items()}}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {name: float((found[name] - expected[name]).abs().max()) for name in found}


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_logits_and_every_gradient_equal_the_reference(kind: str, two_ranks: RankPool) -> None:
    for tolerance, ranks in ((1e-12, [errors(0, 1, kind)]), (1e-10, two_ranks.run(errors, kind))):
        for differences in ranks:
            assert max(differences.values()) < tolerance, differences


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
