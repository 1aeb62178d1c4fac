"""What a block's logits depend on, tried by perturbing one thing at a time."""

import pytest
import torch

from megatron_dspark.blocks import draw_anchors, eligible_anchors, lay_out_blocks
from megatron_dspark.builder import DSparkModelBuilder
from megatron_dspark.model.model import DSparkModel
from tests.megatron import process_groups, tiny_config

LENGTH, ANCHORS = 24, (3, 9, 15, 21)


@pytest.fixture(scope="module", params=("prefix", "dense"))
def model(request: pytest.FixtureRequest) -> DSparkModel:
    config = tiny_config(markov_head_type="rnn", block_attention=request.param)
    return DSparkModelBuilder(config).build_model(process_groups())


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[:, :3] = False
    mask[0, 12] = False
    return {
        "input_ids": torch.randint(0, 100, (2, LENGTH), generator=generator),
        "loss_mask": mask,
        "anchors": torch.tensor([ANCHORS, (5, 9, 18, -1)]),
        "taps": torch.randn(LENGTH, 2, 192, generator=generator, dtype=torch.float64),
        "final_hidden": torch.randn(LENGTH, 2, 64, generator=generator, dtype=torch.float64),
    }


def hidden(model: DSparkModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    layout = lay_out_blocks(
        inputs["input_ids"], inputs["loss_mask"], inputs["anchors"], block_size=5, mask_token_id=127
    )
    with torch.no_grad():
        return model.draft.block_hidden(layout, inputs["taps"])


def test_context_row_matters_exactly_to_later_anchors(model: DSparkModel) -> None:
    before = hidden(model, batch())
    for row in range(LENGTH):
        changed = batch()
        changed["taps"][row, 0] += 1.0
        after = hidden(model, changed)
        for index, anchor in enumerate(ANCHORS):
            same = torch.equal(after[0, index], before[0, index])
            assert same == (row >= anchor), (row, anchor)
        assert torch.equal(after[1], before[1])


def test_other_block_changes_nothing(model: DSparkModel) -> None:
    before = hidden(model, batch())
    changed = batch()
    changed["input_ids"][0, ANCHORS[1]] += 1
    after = hidden(model, changed)
    assert not torch.equal(after[0, 1], before[0, 1])
    for index in (0, 2, 3):
        assert torch.equal(after[0, index], before[0, index])


def loss_and_gradients(model: DSparkModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    numerator, num_tokens, report = model(**inputs)
    numerator.backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return {"numerator": numerator.detach(), "num_tokens": num_tokens, **report, **found}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> None:
    for name, value in expected.items():
        if name not in but:
            assert torch.equal(found[name], value), name


def test_garbage_where_nothing_is_supervised(model: DSparkModel) -> None:
    expected = loss_and_gradients(model, batch())
    changed = batch()
    unread = torch.ones(2, LENGTH, dtype=torch.bool)
    layout = lay_out_blocks(
        changed["input_ids"], changed["loss_mask"], changed["anchors"], block_size=5, mask_token_id=127
    )
    rows = layout.anchors[..., None] + torch.arange(6)
    for sample in range(2):
        for block in range(4):
            if layout.valid[sample, block]:
                unread[sample, rows[sample, block, : int(layout.supervised[sample, block].sum()) + 1]] = False
    assert unread.any()
    changed["input_ids"][unread] = -1
    last = [int(anchors.max()) for anchors in changed["anchors"]]
    for sample in range(2):
        changed["taps"][last[sample] :, sample] = torch.nan
        teacher_unread = unread[sample].clone()
        changed["final_hidden"][teacher_unread, sample] = torch.nan
    assert_same(loss_and_gradients(model, changed), expected)
    changed["input_ids"][unread] = 10**9
    assert_same(loss_and_gradients(model, changed), expected)


def test_padding_anchors_cost_and_change_nothing(model: DSparkModel) -> None:
    expected = loss_and_gradients(model, batch())
    padded = batch()
    padded["anchors"] = torch.cat([padded["anchors"], torch.full((2, 3), -1)], dim=1)
    found = loss_and_gradients(model, padded)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-15, msg=name)


def test_micro_batch_without_any_anchor(model: DSparkModel) -> None:
    empty = batch()
    empty["anchors"] = torch.full((2, 1), -1)
    model.zero_grad(set_to_none=True)
    numerator, num_tokens, _ = model(**empty)
    numerator.backward()
    assert float(numerator) == 0.0 and int(num_tokens) == 0
    assert all(value.grad is None or not value.grad.any() for value in model.parameters())


def test_packed_row_equals_its_documents(model: DSparkModel) -> None:
    """Two documents in one row give what each gives alone: positions restart and nothing crosses."""
    alone = batch()
    alone["anchors"][1] = torch.tensor((5, 9, 18, 20))
    expected = loss_and_gradients(model, alone)
    packed = {
        "input_ids": alone["input_ids"].reshape(1, -1),
        "loss_mask": alone["loss_mask"].reshape(1, -1),
        "anchors": torch.cat([alone["anchors"][0], alone["anchors"][1] + LENGTH])[None],
        "taps": alone["taps"].transpose(0, 1).reshape(-1, 1, 192),
        "final_hidden": alone["final_hidden"].transpose(0, 1).reshape(-1, 1, 64),
        "positions": torch.arange(LENGTH).repeat(2)[None],
        "documents": torch.arange(2).repeat_interleave(LENGTH)[None],
    }
    found = loss_and_gradients(model, packed)
    for name, value in expected.items():
        if name != "anchors_per_sample":
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)
    # What stands after a document's last anchor, before the next document's rows, reaches nobody.
    packed["taps"][ANCHORS[-1] : LENGTH] = torch.nan
    again = loss_and_gradients(model, packed)
    assert_same(again, found)


def test_labels_and_anchors_stay_inside_their_document() -> None:
    documents = torch.tensor([[0] * 7 + [1] * 5 + [-1] * 3])
    everything = torch.ones(1, 15, dtype=torch.bool)
    layout = lay_out_blocks(
        torch.zeros(1, 15, dtype=torch.int64),
        everything,
        torch.tensor([[2, 5, 9, -1]]),
        block_size=4,
        mask_token_id=1,
        documents=documents,
    )
    assert layout.supervised[0].sum(-1).tolist() == [4, 1, 2, 0]
    assert eligible_anchors(everything[0], documents[0]).nonzero().flatten().tolist() == [*range(6), *range(7, 11)]


def test_anchor_draw_is_keyed_and_eligible() -> None:
    mask = torch.zeros(200, dtype=torch.bool)
    mask[20:60] = mask[100:101] = mask[150:199] = True
    key = dict(seed=3, epoch=1, sample_id="a")
    drawn = draw_anchors(mask, 16, **key)
    assert len(drawn) == 16 == len(set(drawn.tolist())) and torch.equal(drawn, drawn.sort().values)
    assert all(mask[a] and mask[a + 1] for a in drawn)
    torch.manual_seed(99)
    assert torch.equal(drawn, draw_anchors(mask, 16, **key))
    for changed in (dict(key, seed=4), dict(key, epoch=2), dict(key, sample_id="b")):
        assert not torch.equal(drawn, draw_anchors(mask, 16, **changed))
    everything = draw_anchors(mask, 10_000, **key)
    assert torch.equal(everything, eligible_anchors(mask).nonzero().flatten())
    assert 100 not in everything and 59 not in everything and 198 not in everything
