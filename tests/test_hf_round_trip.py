"""Weights go from Hugging Face to Megatron and back, and from Megatron to Hugging Face and back, bit for bit.

Every variant runs at tensor-parallel size 1 and 2, with a vocabulary that Megatron has to pad.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.load import load_draft, load_into_module
from tests.distributed import RankPool
from tests.hf_support import SETTINGS, TARGET, random_tensors, tiny_config, write_folder

VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no confidence": {"enable_confidence_head": False},
    "confidence without markov": {"confidence_head_with_markov": False},
    "biases": {"attention_bias": True},
}
# 128 tokens become 144 rows on one rank and 192 on two.
ROWS_PER_RANK = 48
VOCABULARY_NAMES = ("embed_tokens", "lm_head", "markov_head.markov_w1", "markov_head.markov_w2")


def build(variant: dict[str, Any], tensor_parallel_size: int, dtype: torch.dtype, **settings: Any) -> Any:
    """A randomly filled Megatron draft of the variant, on this rank."""
    from megatron_dspark.builder import padded_vocab_size
    from megatron_dspark.model.draft import DSparkDraft
    from tests.megatron import process_groups
    from tests.megatron import tiny_config as model_config

    variant = dict(variant)
    transformer = {"add_qkv_bias": variant.pop("attention_bias", False)}
    weight = float(variant.get("enable_confidence_head", True))
    shared = {"make_vocab_size_divisible_by": ROWS_PER_RANK, "confidence_loss_weight": weight}
    settings = {**shared, **variant, **settings}
    groups = process_groups(tensor_parallel_size)
    config = model_config(tensor_parallel_size, dtype, transformer=transformer, **settings)
    config.finalize()
    draft = DSparkDraft(config, padded_vocab_size(config), groups)
    generator = torch.Generator()
    for number, (_, parameter) in enumerate(draft.named_parameters()):
        # Replicated parameters must agree between ranks, sharded ones should not.
        sharded = getattr(parameter, "tensor_model_parallel", False)
        generator.manual_seed(1000 * number + (groups.tp.rank() if sharded else 0))
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return draft


def export(draft: Any, folder: Path, **arguments: Any) -> Any:
    from megatron_dspark.hf.export import export_draft

    return export_draft(draft, TARGET, folder, **arguments)


def hf_to_megatron_to_hf(rank: int, world_size: int, folder: Path, variant: dict[str, Any], dtype: str) -> list[int]:
    """Load a folder and export it again; return the non-zeros in each table's padded rows, and the rows' number."""
    draft = build(variant, world_size, getattr(torch, dtype))
    load_into_module(folder / "in", draft)
    export(draft, folder / "out", dtype=dtype)
    rows = draft.embed_tokens.weight.shape[0]
    first_padded = max(0, min(rows, SETTINGS.vocab_size - rank * rows))
    padding = [draft.get_parameter(f"{name}.weight")[first_padded:] for name in VOCABULARY_NAMES]
    return [int(table.count_nonzero()) for table in padding] + [rows - first_padded]


def check_hf_to_megatron_to_hf(run: Any, tmp_path: Path, variant: dict[str, Any]) -> None:
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        config = tiny_config(**variant, dtype=dtype)
        tensors = random_tensors(config)
        write_folder(folder / "in", config, tensors)
        padding = run(hf_to_megatron_to_hf, folder, variant, dtype)
        assert all(rank[:-1] == [0, 0, 0, 0] for rank in padding), "padded rows are not zero"
        assert sum(rank[-1] for rank in padding) == {1: 144, 2: 192}[len(padding)] - SETTINGS.vocab_size
        written, read = load_draft(folder / "out")
        assert written == {**config, "initializer_range": 0.02}
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def megatron_to_hf_to_megatron(rank: int, world_size: int, folder: Path, variant: dict[str, Any], dtype: str) -> None:
    """Export a draft and load it into another one: every true row and value must be the same."""
    first = build(variant, world_size, getattr(torch, dtype))
    second = build(variant, world_size, getattr(torch, dtype))
    for parameter in second.parameters():
        parameter.data.fill_(7.0)
    export(first, folder, dtype=dtype)
    load_into_module(folder, second)
    for (name, before), (_, after) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        if name.removesuffix(".weight") in VOCABULARY_NAMES:
            true_rows = max(0, min(before.shape[0], SETTINGS.vocab_size - rank * before.shape[0]))
            before, after = before[:true_rows], after[:true_rows]
        assert torch.equal(before, after), name


def matches_an_independent_mapping(rank: int, world_size: int, folder: Path, kind: str) -> None:
    """Load a golden folder and compare every parameter with shards cut by the tests' own table of names."""
    from tests.megatron import golden_draft, megatron_tensors

    draft = build(VARIANTS[kind], world_size, torch.float32, make_vocab_size_divisible_by=1)
    load_into_module(folder, draft)
    released = {name[2:]: tensor for name, tensor in golden_draft(kind).items() if name.startswith("w/")}
    expected = megatron_tensors(released, rank, world_size)
    parameters = dict(draft.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name]), name


def alone(function: Any, *arguments: Any) -> list[Any]:
    """Run a case on one rank, in this process."""
    return [function(0, 1, *arguments)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_hf_to_megatron_to_hf_on_one_rank(tmp_path: Path, variant: str) -> None:
    check_hf_to_megatron_to_hf(alone, tmp_path, VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_hf_to_megatron_to_hf_on_two_ranks(two_ranks: RankPool, tmp_path: Path, variant: str) -> None:
    check_hf_to_megatron_to_hf(two_ranks.run, tmp_path, VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatron_to_hf_to_megatron_on_one_rank(tmp_path: Path, variant: str, dtype: str) -> None:
    alone(megatron_to_hf_to_megatron, tmp_path / "draft", VARIANTS[variant], dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatron_to_hf_to_megatron_on_two_ranks(two_ranks: RankPool, tmp_path: Path, variant: str, dtype: str) -> None:
    two_ranks.run(megatron_to_hf_to_megatron, tmp_path / "draft", VARIANTS[variant], dtype)


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_released_weights_land_where_an_independent_mapping_puts_them(
    two_ranks: RankPool, fixtures: Path, tmp_path: Path, kind: str
) -> None:
    golden = load_file(fixtures / "golden" / f"draft_{kind}.safetensors")
    released = {name.removeprefix("w/"): tensor for name, tensor in golden.items() if name.startswith("w/")}
    folder = write_folder(tmp_path / "draft", tiny_config(markov_head_type=kind, dtype="float32"), released)
    alone(matches_an_independent_mapping, folder, kind)
    two_ranks.run(matches_an_independent_mapping, folder, kind)


def test_keys_are_loaded_in_any_order(tmp_path: Path) -> None:
    from megatron_dspark.hf.mapping import load_tensors

    config = tiny_config(markov_head_type="gated", dtype="float32")
    tensors = random_tensors(config)
    names = sorted(tensors)
    orders = [names, names[::-1], sorted(names, key=lambda name: name[::-1])]
    loaded = []
    for order in orders:
        draft = build({"markov_head_type": "gated"}, 1, torch.float32)
        load_tensors(draft, config, {name: tensors[name] for name in order})
        loaded.append([parameter.detach().clone() for parameter in draft.parameters()])
    for other in loaded[1:]:
        assert all(torch.equal(first, second) for first, second in zip(loaded[0], other, strict=True))


def exported_bytes(rank: int, world_size: int, folder: Path, variant: dict[str, Any], source: Path) -> None:
    draft = build(variant, world_size, torch.float32)
    load_into_module(source, draft)
    export(draft, folder, provenance={"tau": 2.5})


def test_the_file_is_the_same_on_one_rank_and_on_two(two_ranks: RankPool, tmp_path: Path) -> None:
    variant = VARIANTS["rnn"]
    source = write_folder(tmp_path / "source", tiny_config(**variant, dtype="float32"))
    alone(exported_bytes, tmp_path / "one", variant, source)
    two_ranks.run(exported_bytes, tmp_path / "two", variant, source)
    for file in ("config.json", "model.safetensors", "dspark_export.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_another_draft_s_weights_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "draft", tiny_config(target_layer_ids=(1, 3, 6)))
    draft = build({}, 1, torch.float32)
    before = draft.fc.weight.detach().clone()
    with pytest.raises(DSparkError, match=r"target_layer_ids = \(1, 3, 6\)"):
        load_into_module(folder, draft)
    assert torch.equal(draft.fc.weight, before)


def test_a_wrapped_draft_is_the_draft(tmp_path: Path) -> None:
    from megatron.core.transformer.module import Float16Module

    draft = build({}, 1, torch.bfloat16)
    draft.config.bf16 = True
    wrapped = Float16Module(draft.config, draft)
    export(wrapped, tmp_path / "wrapped")
    export(draft, tmp_path / "plain")
    read = [load_draft(tmp_path / name).tensors for name in ("wrapped", "plain")]
    assert all(torch.equal(read[0][name], read[1][name]) for name in read[1])
    load_into_module(tmp_path / "plain", wrapped)


def test_the_target_s_own_head_stays_out_of_the_file(tmp_path: Path) -> None:
    draft = build({}, 1, torch.float32, train_lm_head=True)
    export(draft, tmp_path / "draft", dtype="float32")
    teacher = draft.teacher_lm_head.weight.detach().clone()
    _, tensors = load_draft(tmp_path / "draft")
    assert torch.equal(tensors["lm_head.weight"], draft.lm_head.weight[: SETTINGS.vocab_size])
    load_into_module(tmp_path / "draft", draft)
    assert torch.equal(draft.teacher_lm_head.weight, teacher)
    record = json.loads((tmp_path / "draft/dspark_export.json").read_text())
    assert record["trained_tables"] == ["lm_head.weight"]
