"""The served draft equals the reference: every anchor of the golden drafts, and the heads' serial paths, in FP64."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dspark.serving.draft import DraftModel
from megatron_dspark.serving.heads import ConfidenceHead, MarkovHead
from tests.serving_support import draft_config, golden_draft, save_draft, scripted

TOLERANCE = 1e-12


@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_every_golden_block(fixtures: Path, tmp_path: Path, head: str) -> None:
    golden = load_file(fixtures / "golden" / f"draft_{head}.safetensors")
    draft = golden_draft(golden, tmp_path, head=head)
    anchors, ids = golden["in/anchor_positions"], golden["in/input_ids"]
    samples, blocks = anchors.shape
    compared = 0
    for sample in range(samples):
        for block in range(blocks):
            if not golden["in/block_keep_mask"][sample, block]:
                continue
            anchor = int(anchors[sample, block])
            context = draft.new_context(ids.shape[1])
            draft.extend_context(context, golden["in/target_hidden_states"][sample, :anchor].double())
            # Slot k's head sees the token before it: the golden run teacher-forces them.
            forced = golden["out/prev_token_ids"][sample, block].tolist()
            assert forced[0] == int(ids[sample, anchor])
            proposal = draft.propose(context, forced[0], scripted([*forced[1:], 0]))
            for name, value in (
                ("base_logits", proposal.base_logits),
                ("draft_logits", proposal.logits),
                ("confidence_pred", proposal.confidence),
            ):
                torch.testing.assert_close(value, golden[f"out/{name}"][sample, block], atol=TOLERANCE, rtol=0)
            hidden = golden["out/final_hidden"][sample].unflatten(0, (blocks, -1))[block]
            torch.testing.assert_close(proposal.hidden, hidden, atol=TOLERANCE, rtol=0)
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_golden_heads(fixtures: Path, kind: str) -> None:
    golden = load_file(fixtures / "golden" / "heads.safetensors")
    head = MarkovHead(kind, vocab_size=32, hidden_size=16, rank=8).double()
    weights = {name.removeprefix(f"{kind}/param/"): t for name, t in golden.items() if name.startswith(f"{kind}/param")}
    head.load_state_dict(weights)

    teacher_forced = torch.empty_like(golden[f"{kind}/out/logits"])
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        state = None
        for slot in range(5):
            at = (*index, slot)
            bias, state = head.step(int(golden["in/prev_token_ids"][at]), golden["in/hidden_states"][at], state)
            teacher_forced[at] = golden["in/base_logits"][at] + bias
    torch.testing.assert_close(teacher_forced, golden[f"{kind}/out/logits"], atol=TOLERANCE, rtol=0)

    for reference in ("deepspec", "automodel"):
        for sample in range(2):
            previous, state = int(golden[f"{kind}/serial/first_prev_token_ids"][sample]), None
            for slot in range(5):
                bias, state = head.step(previous, golden["in/hidden_states"][sample, 0, slot], state)
                logits = golden["in/base_logits"][sample, 0, slot] + bias
                expected = golden[f"{kind}/serial/{reference}/logits"][sample, slot]
                torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
                previous = int(logits.argmax())
                assert previous == int(golden[f"{kind}/serial/{reference}/tokens"][sample, slot])


def test_golden_confidence(fixtures: Path) -> None:
    golden = load_file(fixtures / "golden" / "heads.safetensors")
    head = ConfidenceHead(24).double()
    head.load_state_dict({f"proj.{name}": golden[f"conf/param/proj.{name}"] for name in ("weight", "bias")})
    features = golden["conf/in/features"]
    logits = head(features.flatten(0, 2)).view(features.shape[:-1])
    torch.testing.assert_close(logits, golden["conf/out/logit"], atol=TOLERANCE, rtol=0)


def test_context_in_pieces_equals_context_at_once(tmp_path: Path) -> None:
    """Appending rows one by one, with blocks drafted in between, leaves the same context as appending all at once."""
    config = draft_config()
    draft = DraftModel.load(save_draft(tmp_path / "draft", config), torch.float64, torch.device("cpu"))
    features = torch.randn(9, 2 * config["hidden_size"], generator=torch.Generator().manual_seed(3)).double()
    whole, pieces = draft.new_context(9), draft.new_context(9)
    draft.extend_context(whole, features)
    for start, end in ((0, 1), (1, 5), (5, 9)):
        draft.extend_context(pieces, features[start:end])
        draft.propose(pieces, 3, lambda logits: int(logits.argmax()))
    assert pieces.length == whole.length == 9
    for layer in range(config["num_hidden_layers"]):
        torch.testing.assert_close(pieces.keys[layer][:, :, :9], whole.keys[layer][:, :, :9], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(pieces.values[layer][:, :, :9], whole.values[layer][:, :, :9], atol=1e-12, rtol=0)


def test_narrow_block_is_the_beginning_of_the_whole_block(tmp_path: Path) -> None:
    """A width below γ proposes fewer slots of the same block: the parallel pass does not shrink."""
    draft = DraftModel.load(save_draft(tmp_path / "draft", draft_config()), torch.float64, torch.device("cpu"))
    context = draft.new_context(8)
    draft.extend_context(context, torch.randn(4, 2 * 32, dtype=torch.float64))
    whole = draft.propose(context, 5, lambda logits: int(logits.argmax()))
    narrow = draft.propose(context, 5, lambda logits: int(logits.argmax()), width=2)
    assert narrow.tokens == whole.tokens[:2]
    torch.testing.assert_close(narrow.logits, whole.logits[:2], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(narrow.confidence, whole.confidence[:2], atol=TOLERANCE, rtol=0)
