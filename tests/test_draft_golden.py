"""The whole draft against reference numbers in float64: every stage, every metric, every gradient, at TP 1 and 2."""

from typing import Any

import pytest
import torch

from megatron_dspark.blocks import attention_mask, lay_out_blocks
from megatron_dspark.builder import DSparkModelBuilder
from megatron_dspark.model.model import DSparkModel
from tests.distributed import RankPool
from tests.megatron import golden_draft, load_released, megatron_tensors, process_groups, tiny_config

KINDS = ("vanilla", "gated")


def build(kind: str, tensor_parallel_size: int = 1, **settings: Any) -> tuple[DSparkModel, dict[str, torch.Tensor]]:
    golden = golden_draft(kind)
    groups = process_groups(tensor_parallel_size)
    mask_token = int(_mask_token(golden))
    config = tiny_config(
        tensor_parallel_size, markov_head_type=kind, mask_token_id=mask_token, loss_normalizer="weights", **settings
    )
    model = DSparkModelBuilder(config).build_model(groups)
    load_released(model.draft, {name[2:]: value for name, value in golden.items() if name.startswith("w/")})
    return model, golden


def _mask_token(golden: dict[str, torch.Tensor]) -> torch.Tensor:
    # Slot 1 of the first block is a mask: find whose embedding stands there.
    row = golden["out/noise_embedding"][0, 1]
    return (golden["w/embed_tokens.weight"].double() - row).abs().sum(1).argmin()


def inputs(golden: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    anchors = torch.where(golden["in/block_keep_mask"], golden["in/anchor_positions"], -1)
    return {
        "input_ids": golden["in/input_ids"],
        "loss_mask": golden["in/loss_mask"].bool(),
        "anchors": anchors,
        "taps": golden["in/target_hidden_states"].double().transpose(0, 1),
        "final_hidden": golden["in/target_last_hidden_states"].double().transpose(0, 1),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_layout_matches(kind: str) -> None:
    golden = golden_draft(kind)
    batch = inputs(golden)
    layout = lay_out_blocks(
        batch["input_ids"], batch["loss_mask"], batch["anchors"], block_size=5, mask_token_id=int(_mask_token(golden))
    )
    supervised = golden["out/eval_mask"]
    assert torch.equal(layout.supervised, supervised)
    assert torch.equal(layout.labels[supervised], golden["out/target_ids"][supervised])
    assert torch.equal(layout.previous_ids[supervised], golden["out/prev_token_ids"][supervised])
    length = batch["input_ids"].shape[1]
    assert torch.equal(layout.positions.flatten(1), golden["out/position_ids"][:, length:])
    kept = layout.valid.repeat_interleave(5, dim=1)
    mask = attention_mask(layout, length)[:, 0]
    assert torch.equal(mask[kept], golden["out/attn_mask_bool"][:, 0][kept])


@pytest.mark.parametrize("kind", KINDS)
def test_stages_and_rows_match(kind: str) -> None:
    model, golden = build(kind)
    batch = inputs(golden)
    draft = model.draft
    context = draft.context_features(batch["taps"]).transpose(0, 1)
    torch.testing.assert_close(context, golden["out/context_feature"], rtol=0, atol=1e-12)
    rows = draft(**batch)
    supervised = golden["out/eval_mask"]
    expected = golden["out/final_hidden"].view(2, 4, 5, 64)[supervised]
    torch.testing.assert_close(rows.hidden, expected, rtol=0, atol=1e-12)
    logits = rows.hidden @ draft.lm_head.weight.T + rows.latent @ draft.markov_head.markov_w2.weight.T
    torch.testing.assert_close(logits, golden["out/draft_logits"][supervised], rtol=0, atol=1e-12)
    torch.testing.assert_close(rows.confidence_logits, golden["out/confidence_pred"][supervised], rtol=0, atol=1e-12)
    teacher = rows.teacher_hidden @ draft.teacher_head_weight.T
    torch.testing.assert_close(teacher, golden["out/aligned_target_logits"][supervised], rtol=0, atol=1e-12)


def loss_and_gradients(rank: int, size: int, kind: str, recompute: bool = False) -> dict[str, torch.Tensor]:
    transformer = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model, golden = build(kind, size, **({"transformer": transformer} if recompute else {}))
    model.train()
    numerator, num_tokens, report = model(**inputs(golden))
    # The reference adds 1e-6 to the sum of weights against division by zero; ours needs no such guard.
    divisor = num_tokens + 1e-6
    (numerator / divisor).backward()
    expected = megatron_tensors(
        {name[9:]: value for name, value in golden.items() if name.startswith("out/grad/")}, rank, size
    )
    gradients = {name: value.grad for name, value in model.draft.named_parameters() if value.grad is not None}
    if size > 1:
        for name, gradient in gradients.items():
            # Each rank has the part of its own heads; finalize_model_grads sums these by name.
            if "q_layernorm" in name or "k_layernorm" in name:
                torch.distributed.all_reduce(gradient, group=model.pg_collection.tp)
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    result = {f"grad {name}": (gradients[name] - expected[name]).abs().max() for name in expected}
    result["loss"] = (report["loss"][0] / divisor - golden["out/loss"]).abs()
    result["tau"] = (report["tau"][0] - golden["out/terms/num/tau_probabilistic"]).abs()
    result["blocks"] = (report["tau"][1] - golden["out/terms/den/tau_probabilistic"]).abs()
    return {name: value.detach().clone() for name, value in result.items()}


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_every_gradient(kind: str, recompute: bool) -> None:
    for name, error in loss_and_gradients(0, 1, kind, recompute).items():
        assert error < 1e-12, (name, float(error))


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_equals_one_rank(kind: str, two_ranks: RankPool) -> None:
    for rank_errors in two_ranks.run(loss_and_gradients, kind):
        for name, error in rank_errors.items():
            assert error < 1e-10, (name, float(error))
