"""The loss that is logged is the one optimised, the metrics mean what they say, and bad settings are refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.objective.loss import FractionalDivisor, ObjectiveConfig, SupervisedRows, dspark_loss
from megatron_dspark.objective.metrics import reduce_report
from tests.objective_reference import random_rows, reference_terms


def config(**changes: Any) -> ObjectiveConfig:
    return ObjectiveConfig(**({"block_size": 5, "vocab_size": 37} | changes))


def loss_of(rows: SupervisedRows, matrices: dict[str, Tensor], settings: ObjectiveConfig) -> Any:
    return dspark_loss(rows, matrices["lm_head"], matrices["teacher_head"], matrices["markov_w2"], settings)


@pytest.mark.parametrize("gamma", [4.0, 0.7, None])
@pytest.mark.parametrize("normalizer", ["tokens", "weights"])
def test_loss_is_the_formula(gamma: float | None, normalizer: str) -> None:
    rows, matrices = random_rows(0)
    settings = config(
        ce_loss_weight=0.3,
        l1_loss_weight=0.6,
        confidence_loss_weight=0.5,
        loss_decay_gamma=gamma,
        loss_normalizer=normalizer,
    )
    numerator, num_tokens, report = loss_of(rows, matrices, settings)
    ce, l1, agree = reference_terms(
        rows.hidden, rows.latent, matrices["lm_head"], matrices["markov_w2"], rows.teacher_hidden,
        matrices["teacher_head"], rows.labels, 37,
    )  # fmt: skip
    accept = (1 - l1 / 2).clamp(0, 1)
    c = rows.confidence_logits.sigmoid()
    confidence = -(accept * c.log() + (1 - accept) * (1 - c).log())
    total = weights = 0.0
    for row in range(len(rows.labels)):
        weight = 1.0 if gamma is None else math.exp(-int(rows.slot[row]) / gamma)
        total += weight * float(0.3 * ce[row] + 0.6 * l1[row] + 0.5 * confidence[row])
        weights += weight
    divisor = len(rows.labels) if normalizer == "tokens" else weights
    assert float(numerator) == pytest.approx(total, rel=1e-12)
    assert float(num_tokens) == pytest.approx(divisor, rel=1e-12)
    assert reduce_report([report])["loss"] == pytest.approx(total / divisor, rel=1e-12)

    # Block metrics, block by block.
    taus, slots_seen = [], [0] * 5
    for block in range(rows.num_blocks):
        of_block = rows.block == block
        accepts = accept[of_block].tolist()
        for k in range(len(accepts)):
            slots_seen[k] += 1
        if accepts:
            taus.append(1 + sum(math.prod(accepts[: k + 1]) for k in range(len(accepts))))
    assert len(taus) < rows.num_blocks, "a block without supervised slots was wanted"
    metrics = reduce_report([report])
    assert metrics["tau"] == pytest.approx(sum(taus) / len(taus), rel=1e-12)
    assert metrics["top1_agreement"] == pytest.approx(float(agree.mean()), rel=1e-12)
    assert metrics["accept_rate"] == pytest.approx(float(accept.mean()), rel=1e-12)
    assert metrics["supervised_slots_per_block"] == len(rows.labels) / rows.num_blocks
    assert metrics["anchors_per_sample"] == rows.num_blocks / 3
    for k in range(5):
        at_slot = rows.slot == k
        assert report[f"accept_rate@{k}"][1] == slots_seen[k]
        assert metrics[f"accept_rate@{k}"] == pytest.approx(float(accept[at_slot].mean()), rel=1e-12)
        assert metrics[f"top1_agreement@{k}"] == pytest.approx(float(agree[at_slot].mean()), rel=1e-12)


def test_confidence_gradient_reaches_the_logits_and_not_the_accept_rate() -> None:
    rows, matrices = random_rows(1)
    rows.confidence_logits.requires_grad_()
    rows.hidden.requires_grad_()
    numerator, _, _ = loss_of(rows, matrices, config(confidence_loss_weight=0.5))
    hidden, logits = torch.autograd.grad(numerator, (rows.hidden, rows.confidence_logits))
    numerator, _, report = loss_of(rows, matrices, config(confidence_loss_weight=0.0))
    without, none = torch.autograd.grad(numerator, (rows.hidden, rows.confidence_logits))
    assert torch.equal(hidden, without) and not none.any()
    _, l1, _ = reference_terms(
        rows.hidden, rows.latent, matrices["lm_head"], matrices["markov_w2"], rows.teacher_hidden,
        matrices["teacher_head"], rows.labels, 37,
    )  # fmt: skip
    weight = torch.exp(-rows.slot / 4.0)
    error = rows.confidence_logits.detach().sigmoid() - (1 - l1.detach() / 2).clamp(0, 1)
    torch.testing.assert_close(logits, 0.5 * weight * error, rtol=1e-6, atol=1e-8)
    assert float(report["confidence_abs_error"][0]) > abs(float(report["confidence_bias"][0]))


def test_the_teachers_own_hidden_state_gives_tau_block_size_plus_one() -> None:
    _, matrices = random_rows(2, dtype=torch.float32)
    keep = torch.randn(6 * 5, 12, generator=torch.Generator().manual_seed(0))
    full = SupervisedRows(
        keep, None, None, keep.clone(), torch.zeros(30).long(), torch.arange(30) % 5, torch.arange(30) // 5, 6, 3
    )
    head = matrices["lm_head"]
    _, _, report = dspark_loss(full, head, head.clone(), None, config(confidence_loss_weight=0.0))
    assert report["l1_loss"][0] == 0.0
    assert reduce_report([report])["tau"] == 6.0
    assert reduce_report([report])["top1_agreement"] == 1.0


@pytest.mark.parametrize("with_confidence", [True, False])
def test_a_micro_batch_without_rows_reports_the_same_metrics(with_confidence: bool) -> None:
    rows, matrices = random_rows(3)
    empty, _ = random_rows(3, blocks=0)
    settings = config(confidence_loss_weight=1.0 if with_confidence else 0.0)
    if not with_confidence:
        rows.confidence_logits = empty.confidence_logits = None
    matrices["markov_w2"].requires_grad_()
    numerator, num_tokens, nothing = loss_of(empty, matrices, settings)
    numerator.backward()
    assert numerator == 0 and num_tokens == 0 and not matrices["markov_w2"].grad.any()
    _, _, report = loss_of(rows, matrices, settings)
    assert nothing.keys() == report.keys()
    assert ("confidence_loss" in report) == with_confidence
    assert reduce_report([nothing, report]) == pytest.approx(reduce_report([report]) | {
        "anchors_per_sample": rows.num_blocks / 6  # three more samples, without a block
    })  # fmt: skip
    assert all(math.isnan(value) for name, value in reduce_report([nothing]).items() if name != "anchors_per_sample")


def test_a_window_of_reports_is_a_mean_over_slots_not_over_reports() -> None:
    small, matrices = random_rows(4, blocks=2)
    large, _ = random_rows(5, blocks=30)
    reports = [loss_of(rows, matrices, config())[2] for rows in (small, large)]
    counts = [len(small.labels), len(large.labels)]
    accepts = [float(report["accept_rate"][0] / report["accept_rate"][1]) for report in reports]
    mean = sum(a * c for a, c in zip(accepts, counts, strict=True)) / sum(counts)
    assert reduce_report(reports)["accept_rate"] == pytest.approx(mean, rel=1e-12)


def test_fractional_divisor_counts_training_only_and_starts_anew_each_step() -> None:
    seen: list[tuple[float, Any]] = []
    divisor = FractionalDivisor(lambda model, total, **kwargs: seen.append((float(total), kwargs)))
    for step in (1, 2):
        counter = torch.zeros([], dtype=torch.int)
        for _ in range(step):
            counter += divisor.count(torch.tensor(2.25, dtype=torch.float64))
        with torch.no_grad():
            counter += divisor.count(torch.tensor(100.0, dtype=torch.float64))
        divisor([None], counter, pg_collection="groups")
    divisor([None], torch.zeros([], dtype=torch.int))  # an earlier pipeline stage: nothing counted
    assert seen == [(2.25, {"pg_collection": "groups"}), (4.5, {"pg_collection": "groups"}), (0.0, {})]
    with pytest.raises(DSparkError, match="calculate_per_token_loss is False"):
        divisor([None], None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ce_loss_weight": -0.1}, "ce_loss_weight is -0.1"),
        ({"l1_loss_weight": math.inf}, "l1_loss_weight is inf"),
        ({"confidence_loss_weight": math.nan}, "confidence_loss_weight is nan"),
        ({"ce_loss_weight": 0, "l1_loss_weight": 0, "confidence_loss_weight": 0}, "are all 0"),
        ({"loss_decay_gamma": 0.0}, "loss_decay_gamma is 0.0"),
        ({"loss_decay_gamma": -4}, "loss_decay_gamma is -4"),
        ({"loss_normalizer": "mean"}, "loss_normalizer is 'mean': choose one of tokens, weights"),
        ({"block_size": 0}, "block_size is 0"),
        ({"vocab_size": 2.5}, "vocab_size is 2.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DSparkError, match=sentence):
        config(**changes)


def test_rows_that_do_not_fit_the_settings_are_refused() -> None:
    rows, matrices = random_rows(6)
    with pytest.raises(DSparkError, match=r"confidence_loss_weight is 1\.0 but the draft has no confidence logits"):
        loss_of(replace(rows, confidence_logits=None), matrices, config())
    trained = matrices["lm_head"].requires_grad_()
    with pytest.raises(DSparkError, match="teacher_head is the trained lm_head"):
        dspark_loss(rows, trained, trained, matrices["markov_w2"], config())
    with torch.no_grad():
        dspark_loss(rows, trained, trained, matrices["markov_w2"], config())
    with pytest.raises(DSparkError, match="0 reports"):
        reduce_report([])
    report = loss_of(rows, matrices, config(block_size=6))[2]
    with pytest.raises(DSparkError, match="reports of one objective"):
        reduce_report([report, loss_of(rows, matrices, config())[2]])
