"""Every attention of the draft against the dense mask: outputs, gradients, and how much is computed."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron_dspark.blocks import BlockLayout, attention_mask, context_spans, lay_out_blocks
from megatron_dspark.errors import DSparkError
from megatron_dspark.model import prefix_attention as prefix
from megatron_dspark.model.block_attention import block_attention
from megatron_dspark.model.flex_attention import flex_block_mask, flex_over_heads

SIZE, HEADS, GROUPS, WIDTH = 5, 6, 2, 8
KINDS = ("plain", "packed", "unsorted", "nothing to see", "no anchor")


def case(kind: str, length: int = 70, blocks: int = 12) -> tuple[BlockLayout, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    anchors = torch.stack([torch.randperm(length - 1, generator=generator)[:blocks].sort().values for _ in range(2)])
    anchors[1, blocks - 3 :] = -1
    documents = None
    if kind == "packed":
        documents = torch.tensor([0] * 20 + [1] * 31 + [-1] * 3 + [2] * (length - 54)).repeat(2, 1)
        documents[1, 40:] = 7
        anchors = torch.where((anchors >= 51) & (anchors < 54), 54, anchors)
    if kind == "unsorted":
        anchors = anchors[:, torch.randperm(blocks, generator=generator)]
    if kind == "nothing to see":
        anchors[0, :2], documents = (
            torch.tensor([0, 30]),
            torch.arange(length).div(30, rounding_mode="floor").repeat(2, 1),
        )
    if kind == "no anchor":
        anchors[0] = -1
    ids = torch.zeros(2, length, dtype=torch.int64)
    return lay_out_blocks(ids, ids.bool(), anchors, block_size=SIZE, mask_token_id=0, documents=documents), documents


def tensors(layout: BlockLayout, length: int, gradient: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    slots = layout.anchors.shape[1] * SIZE
    shapes = [(slots, HEADS), (length, GROUPS), (length, GROUPS), (slots, GROUPS), (slots, GROUPS)]
    drawn = [torch.randn(n, 2, heads, WIDTH, generator=generator, dtype=torch.float64) for n, heads in shapes]
    return [rows.requires_grad_(gradient) for rows in drawn]


def output_and_gradients(kind: str, name: str, length: int = 70) -> list[torch.Tensor]:
    layout, documents = case(name, length)
    rows = tensors(layout, length)
    output = block_attention(kind, layout, length, documents)(*rows)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, rows, direction)]


@pytest.mark.parametrize("group_slots", (1, 20, 128))
@pytest.mark.parametrize("name", KINDS)
def test_prefix_equals_dense(name: str, group_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "GROUP_SLOTS", group_slots)
    for found, expected in zip(output_and_gradients("prefix", name), output_and_gradients("dense", name), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", (70, 300))
@pytest.mark.parametrize("tile", (16, 32))
def test_flex_mask_and_tiles_equal_dense(name: str, length: int, tile: int) -> None:
    layout, documents = case(name, length, blocks=40 if length == 300 else 12)
    starts, ends = context_spans(layout.padded_anchors, documents)
    ours = flex_block_mask(starts, ends, SIZE, length, tile)
    slots = starts.shape[1] * SIZE
    dense = attention_mask(layout, length, documents)
    everywhere = [torch.arange(size) for size in (2, slots, length + slots)]
    sample, slot, key = torch.meshgrid(*everywhere, indexing="ij")
    assert torch.equal(ours.mask_mod(sample, None, slot, key), dense[:, 0])
    theirs = create_block_mask(
        ours.mask_mod, 2, None, slots, length + slots, device="cpu", BLOCK_SIZE=tile, separate_full_blocks=True
    )
    # The last tile of a row or column is never full: FlexAttention counts what lies outside as masked.
    touched, full = ours.to_dense(), tiles(ours.full_kv_num_blocks, ours.full_kv_indices)
    expected_full = tiles(theirs.full_kv_num_blocks, theirs.full_kv_indices)
    assert torch.equal(touched, theirs.to_dense())
    assert (full <= full_tiles(dense, tile)).all() and (expected_full <= full).all()
    if length == 300 and name == "plain":
        assert full.any()


def tiles(counts: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros(columns.shape, dtype=torch.bool)
    listed = torch.arange(columns.shape[-1]) < counts[..., None]
    return chosen.scatter_(-1, columns.long(), listed)


def full_tiles(dense: torch.Tensor, tile: int) -> torch.Tensor:
    """Tiles of which every entry that exists is visible."""
    rows, columns = (-size % tile for size in dense.shape[-2:])
    padded = torch.nn.functional.pad(dense, (0, columns, 0, rows), value=True)
    return padded.unflatten(-1, (-1, tile)).unflatten(-3, (-1, tile)).all(-1).all(-2)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_output_equals_dense(name: str) -> None:
    layout, documents = case(name)
    query, context_key, context_value, key, value = tensors(layout, 70, gradient=False)
    mask = flex_block_mask(*context_spans(layout.padded_anchors, documents), SIZE, 70)
    found = flex_over_heads(
        flex_attention, query, torch.cat([context_key, key]), torch.cat([context_value, value]), mask
    )
    expected = block_attention("dense", layout, 70, documents)(query, context_key, context_value, key, value)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_flex_is_refused_without_cuda() -> None:
    layout, documents = case("plain")
    with pytest.raises(DSparkError, match="needs a CUDA device, and the tensors are on cpu"):
        block_attention("flex", layout, 70, documents)(*tensors(layout, 70))


def test_prefix_never_reads_rows_that_nobody_sees() -> None:
    layout, documents = case("packed")
    starts, ends = context_spans(layout.padded_anchors, documents)
    seen = torch.zeros(2, 70, dtype=torch.bool)
    for sample in range(2):
        for start, end in zip(starts[sample], ends[sample], strict=True):
            seen[sample, start:end] = True
    assert not seen.all()
    rows = tensors(layout, 70)
    expected = block_attention("prefix", layout, 70, documents)(*rows)
    spoilt = [part.detach().clone() for part in rows]
    for part in spoilt[1:3]:
        part.transpose(0, 1)[~seen] = torch.nan
    spoilt = [part.requires_grad_() for part in spoilt]
    found = block_attention("prefix", layout, 70, documents)(*spoilt)
    assert torch.equal(found, expected)
    for part in torch.autograd.grad(found.sum(), spoilt):
        assert torch.isfinite(part).all()


def test_prefix_computes_about_what_is_visible() -> None:
    length, blocks, size = 2048, 512, 7
    anchors = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[:blocks].sort().values
    ends, starts = anchors[None], torch.zeros(1, blocks, dtype=torch.int64)
    computed = sum(len(group.blocks) * (group.last - group.first) for group in prefix.group_blocks(starts, ends, size))
    assert int(ends.sum()) <= computed < 1.06 * int(ends.sum())


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_operands_cost_their_own_rounding_alone(name: str) -> None:
    """As on a GPU: bf16 operands and results, everything else in FP32, against the dense mask over the same values."""
    layout, documents = case(name)
    rows = [part.detach().bfloat16() for part in tensors(layout, 70)]
    half, exact = ([part.to(dtype).requires_grad_() for part in rows] for dtype in (torch.bfloat16, torch.float64))
    starts, ends = context_spans(layout.padded_anchors, documents)
    output = prefix._PrefixAttention.apply(*half, ends, prefix.group_blocks(starts, ends, SIZE))
    expected = block_attention("dense", layout, 70, documents)(*exact)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = [output.detach(), *torch.autograd.grad(output, half, direction)]
    for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, exact, direction.double())], strict=True):
        assert ours.dtype == torch.bfloat16
        # Rounded operands, sums in FP32: a rounding or two of bf16 (2⁻⁸ each) of the largest value.
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2**-7 * float(theirs.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor cores are CUDA's")
@pytest.mark.parametrize("name", KINDS)
def test_half_precision_on_cuda_equals_single(name: str) -> None:
    layout, documents = case(name)
    layout = BlockLayout(**{field: value.cuda() for field, value in vars(layout).items()})
    attend = block_attention("prefix", layout, 70, None if documents is None else documents.cuda())
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        rows = [part.detach().bfloat16().to(dtype).cuda().requires_grad_() for part in tensors(layout, 70)]
        output = attend(*rows)
        results.append([output.detach(), *torch.autograd.grad(output.float().sum(), rows)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=2**-7 * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's kernel runs on CUDA")
@pytest.mark.parametrize("name", KINDS)
def test_flex_kernel_equals_prefix_on_cuda(name: str) -> None:
    results = []
    for kind in ("flex", "prefix"):
        layout, documents = case(name)
        layout = BlockLayout(**{field: value.cuda() for field, value in vars(layout).items()})
        # A head width that the kernel takes.
        rows = [part.detach().repeat(1, 1, 1, 4).float().cuda().requires_grad_() for part in tensors(layout, 70)]
        output = block_attention(kind, layout, 70, None if documents is None else documents.cuda())(*rows)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), rows)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
