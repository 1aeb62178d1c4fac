"""The objective equals the reference implementations on the golden cases, under both normalisers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dspark.objective.fused import vocab_parallel_ce_l1
from megatron_dspark.objective.loss import ObjectiveConfig, SupervisedRows, dspark_loss

CASES = ("main", "gamma_none", "no_conf", "only_ce", "disjoint", "identical", "hole", "all_masked")
FOLDERS = {"tokens": "token_normalized", "weights": "weights_normalized"}
# Our name for a golden metric, where they differ.
OURS = {"tau_probabilistic": "tau", "confidence_cumprod_bias": "confidence_prefix_bias"}
# The reference divides by the sum of weights + 1e-6, its guard against 0 / 0; we divide by the sum.
REFERENCE_GUARD = 1e-6


class Golden:
    """One golden case: every logit is a hidden state, and the LM head is the identity."""

    def __init__(self, fixtures: Path, case: str) -> None:
        tensors = load_file(fixtures / "golden" / "objective.safetensors")
        self.settings = json.loads((fixtures / "golden" / "objective.json").read_text())[case]
        self.tensors = {name.removeprefix(case + "/"): t for name, t in tensors.items() if name.startswith(case + "/")}
        self.samples, self.anchors, self.block_size, self.vocab_size = self.tensors["in/draft_logits"].shape
        self.head = torch.eye(self.vocab_size, dtype=torch.float64)
        self.draft = self.flat("in/draft_logits").clone().requires_grad_()
        confidence = self.flat("in/confidence_logits")
        self.confidence = None if confidence is None else confidence.clone().requires_grad_()
        self.index = self.flat("in/eval_mask").nonzero()[:, 0]

    def flat(self, name: str) -> Tensor | None:
        """A tensor with samples, anchors and slots in one dimension."""
        return self.tensors[name].flatten(0, 2) if name in self.tensors else None

    def rows(self) -> SupervisedRows:
        teacher = self.flat("in/target_logits")
        return SupervisedRows(
            hidden=self.draft[self.index],
            latent=None,
            confidence_logits=None if self.confidence is None else self.confidence[self.index],
            # Cross-entropy alone was recorded without a teacher; any will do.
            teacher_hidden=torch.zeros_like(self.draft)[self.index] if teacher is None else teacher[self.index],
            labels=self.flat("in/labels")[self.index],
            slot=self.index % self.block_size,
            block=self.index // self.block_size,
            num_blocks=self.samples * self.anchors,
            num_anchor_samples=self.samples,
        )

    def config(self, normalizer: str) -> ObjectiveConfig:
        ce_weight, l1_weight, confidence_weight = self.settings["alphas"]
        return ObjectiveConfig(
            block_size=self.block_size,
            vocab_size=self.vocab_size,
            ce_loss_weight=ce_weight,
            l1_loss_weight=l1_weight,
            confidence_loss_weight=0.0 if self.confidence is None else confidence_weight,
            loss_decay_gamma=self.settings["gamma"],
            loss_normalizer=normalizer,
        )


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected.to(torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("normalizer", FOLDERS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(fixtures: Path, case: str, normalizer: str) -> None:
    golden = Golden(fixtures, case)
    numerator, num_tokens, report = dspark_loss(
        golden.rows(), golden.head, golden.head, None, golden.config(normalizer)
    )
    numerator.backward()
    reference = {name: golden.tensors.get(f"{FOLDERS[normalizer]}/{name}") for name in ("loss_backward", "num_tokens")}
    if normalizer == "tokens":
        assert num_tokens.dtype == torch.int32 and num_tokens == reference["num_tokens"]
        close(numerator, golden.tensors["token_normalized/loss_unnormalized_sum"])
        divisor = num_tokens.clamp(min=1)
    else:
        close(num_tokens, golden.tensors["ref/weight_sum"])
        divisor = num_tokens + REFERENCE_GUARD
    close(numerator / divisor, reference["loss_backward"])
    close(report["loss"], torch.stack([numerator.detach(), num_tokens.double()]))
    gradient = golden.tensors[f"{FOLDERS[normalizer]}/grad_draft_logits"].flatten(0, 2)
    if case == "identical" and normalizer == "tokens":
        # That reference forms p and q by different operations, so it follows the sign of rounding errors where p
        # equals q. The other one does not, and its gradient differs by the divisor only.
        other = golden.tensors["weights_normalized/grad_draft_logits"].flatten(0, 2)
        gradient = other * (golden.tensors["ref/weight_sum"] + REFERENCE_GUARD) / num_tokens
    close(golden.draft.grad / divisor, gradient)
    if golden.confidence is not None:
        expected = golden.tensors[f"{FOLDERS[normalizer]}/grad_confidence_logits"].flatten()
        close(golden.confidence.grad / divisor, expected)


@pytest.mark.parametrize("case", CASES)
def test_metrics(fixtures: Path, case: str) -> None:
    golden = Golden(fixtures, case)
    _, _, report = dspark_loss(golden.rows(), golden.head, golden.head, None, golden.config("weights"))
    prefix = "weights_normalized/num/"
    names = [name.removeprefix(prefix) for name in golden.tensors if name.startswith(prefix)]
    assert len(names) >= 7
    if case == "only_ce":
        names = ["ce_loss"]  # without a teacher the reference reports zero acceptance
    for name in names:
        pair = torch.stack([golden.tensors[f"weights_normalized/{part}/{name}"] for part in ("num", "den")])
        torch.testing.assert_close(report[OURS.get(name, name)], pair, rtol=1e-12, atol=1e-12, msg=name)
    if case != "only_ce":
        by_slot = torch.stack([golden.tensors[f"ref/accept_rate_pos_{part}"] for part in ("num", "den")])
        close(report["accept_rate"], by_slot.sum(1))


def test_terms_of_every_row(fixtures: Path) -> None:
    golden = Golden(fixtures, "main")
    tensors = load_file(fixtures / "golden" / "objective.safetensors")
    # Hidden states and a head whose product gives the logits to 5e-7, the precision in which they were stored.
    head, ones = tensors["hidden/lm_head"], torch.ones(30, dtype=torch.float64)
    hidden, teacher_hidden = (tensors[f"hidden/{name}_hidden"].flatten(0, 2) for name in ("draft", "target"))
    labels = golden.flat("in/labels")
    terms = vocab_parallel_ce_l1(
        hidden, None, head, None, teacher_hidden, head, labels, ones, ones, vocab_size=golden.vocab_size
    )
    for name, value in (("ce", terms.ce), ("l1", terms.l1), ("accept", terms.accept)):
        torch.testing.assert_close(value, golden.flat(f"ref/{name}_per_token"), rtol=0, atol=5e-6)


def test_disjoint_distributions_have_no_overlap() -> None:
    logits = torch.zeros(2, 1, 6, dtype=torch.float64)
    logits[0, :, :3], logits[1, :, 3:] = 1e4, 1e4
    head = torch.eye(6, dtype=torch.float64)
    rows = SupervisedRows(
        logits[0], None, None, logits[1], torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), 1, 1
    )
    _, _, report = dspark_loss(
        rows, head, head, None, ObjectiveConfig(block_size=1, vocab_size=6, confidence_loss_weight=0.0)
    )
    for name, pair in (("l1_loss", [2.0, 1.0]), ("accept_rate", [0.0, 1.0]), ("tau", [1.0, 1.0])):
        close(report[name], torch.tensor(pair))
