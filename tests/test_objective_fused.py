"""The fused terms equal the materialized reference for any shape, chunk, type and logits, in bounded memory."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dspark.errors import DSparkError
from megatron_dspark.objective import chunk, fused
from megatron_dspark.objective.chunk import RUN, first_max
from megatron_dspark.objective.fused import VocabTerms, vocab_parallel_ce_l1
from tests.objective_reference import reference_terms


def problem(
    seed: int, rows: int, vocab: int, hidden: int, rank: int, dtype: torch.dtype, scale: float = 1.0, padding: int = 3
) -> dict[str, Any]:
    """Arguments of `vocab_parallel_ce_l1`; rank 0 means no sequential head. Padding rows are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def head(width: int) -> Tensor:
        return torch.cat([normal(vocab, width), torch.full((padding, width), torch.nan)]).to(dtype)

    return {
        "hidden": (normal(rows, hidden) * scale).to(dtype).requires_grad_(),
        "latent": (normal(rows, rank) * scale).to(dtype).requires_grad_() if rank else None,
        "lm_head": head(hidden).requires_grad_(),
        "markov_w2": head(rank).requires_grad_() if rank else None,
        "teacher_hidden": (normal(rows, hidden) * scale).to(dtype),
        "teacher_head": head(hidden),
        "labels": torch.randint(vocab, (rows,), generator=generator),
        "ce_weight": torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype),
        "l1_weight": torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype),
    }


TRAINED = ("hidden", "latent", "lm_head", "markov_w2")


def gradients(loss: Tensor, arguments: dict[str, Any]) -> dict[str, Tensor]:
    trained = {name: arguments[name] for name in TRAINED if arguments[name] is not None}
    return dict(zip(trained, torch.autograd.grad(loss, tuple(trained.values())), strict=True))


def reference(arguments: dict[str, Any], vocab: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """CE, L1, agreement and gradients in float64, from copies of the arguments."""
    exact = {
        name: value.detach().double().requires_grad_(name in TRAINED)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    ce_weight, l1_weight = exact.pop("ce_weight"), exact.pop("l1_weight")
    ce, l1, agree = reference_terms(**exact, vocab_size=vocab)
    return ce, l1, agree, gradients((ce_weight * ce + l1_weight * l1).sum(), exact)


def check(
    arguments: dict[str, Any], vocab: int, chunk_bytes: int | None, rtol: float, atol: float, check_gradients: bool
) -> VocabTerms:
    terms = vocab_parallel_ce_l1(**arguments, vocab_size=vocab, chunk_bytes=chunk_bytes)
    ce, l1, agree, expected = reference(arguments, vocab)
    got = gradients(terms.loss, arguments)
    statistics = torch.float64 if arguments["hidden"].dtype == torch.float64 else torch.float32
    for value in (terms.loss, terms.ce, terms.l1, terms.accept):
        assert value.dtype == statistics
    assert bool(terms.finite)
    torch.testing.assert_close(terms.ce.double(), ce.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(terms.l1.double(), l1.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(terms.accept, (1 - terms.l1 / 2).clamp(0, 1))
    for name in got if check_gradients else ():
        assert got[name].dtype == arguments[name].dtype
        # A gradient is a sum over rows or vocabulary of terms that may cancel: compare on its own scale.
        scale = max([1.0, *expected[name].abs().flatten().tolist()])
        torch.testing.assert_close(got[name].double() / scale, expected[name] / scale, rtol=rtol, atol=atol)
    if statistics == torch.float64:
        assert torch.equal(terms.top1_agree, agree)
    return terms


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 20),
    vocab=st.one_of(st.integers(1, 40), st.integers(4 * RUN - 3, 4 * RUN + 40)),
    hidden=st.integers(1, 9),
    rank=st.integers(0, 4),
    chunk_rows=st.integers(1, 30),
    block_rows=st.integers(1, 30),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 5.0]),
)
def test_any_shape_and_chunk_in_float64(
    seed: int, rows: int, vocab: int, hidden: int, rank: int, chunk_rows: int, block_rows: int, scale: float
) -> None:
    arguments = problem(seed, rows, vocab, hidden, rank, torch.float64, scale)
    row_bytes = (vocab + 3) * 8
    # Rows of this size would all fit into the cache, so that a chunk would be one block.
    with mock.patch.object(fused, "CACHE_BYTES", block_rows * row_bytes):
        check(arguments, vocab, chunk_rows * 2 * row_bytes, rtol=1e-9, atol=1e-11, check_gradients=scale > 0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 12),
    vocab=st.integers(2, 60),
    rank=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_narrow_types_keep_float32_statistics(seed: int, rows: int, vocab: int, rank: int, dtype: torch.dtype) -> None:
    arguments = problem(seed, rows, vocab, 6, rank, dtype)
    # The inputs are exact in float64; only the stored gradient is rounded to their type.
    terms = vocab_parallel_ce_l1(**arguments, vocab_size=vocab)
    ce, l1, _, expected = reference(arguments, vocab)
    torch.testing.assert_close(terms.ce.double(), ce.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(terms.l1.double(), l1.detach(), rtol=2e-5, atol=2e-5)
    rounding = {torch.float32: 5e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for name, gradient in gradients(terms.loss, arguments).items():
        scale = max([1.0, *expected[name].abs().flatten().tolist()])
        torch.testing.assert_close(gradient.double() / scale, expected[name] / scale, rtol=rounding, atol=rounding)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), vocab=st.integers(2, 12), rows=st.integers(1, 6), dtype=st.sampled_from(["float32", "float64"]))
def test_extreme_logits(data: st.DataObject, vocab: int, rows: int, dtype: str) -> None:
    # Identity heads: the hidden states are the logits. Few values, so ties, one-hot teachers and equal rows abound.
    values = st.sampled_from([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4])
    matrices = st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows)
    kind, head = getattr(torch, dtype), torch.eye(vocab, dtype=getattr(torch, dtype))
    arguments = {
        "hidden": torch.tensor(data.draw(matrices), dtype=kind, requires_grad=True),
        "latent": None,
        "lm_head": head.clone().requires_grad_(),
        "markov_w2": None,
        "teacher_hidden": torch.tensor(data.draw(matrices), dtype=kind),
        "teacher_head": head,
        "labels": torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows))),
        "ce_weight": torch.ones(rows, dtype=kind),
        "l1_weight": torch.ones(rows, dtype=kind),
    }
    chunk_bytes = data.draw(st.sampled_from([1, 200, 10**6]))
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    # Where two probabilities agree to the last bit, the sign of their difference is decided by rounding, here and in
    # the reference alike: gradients are compared where no two probabilities are near each other without being equal.
    p, q = (arguments[n].detach().double().softmax(-1) for n in ("hidden", "teacher_hidden"))
    gap = (p - q).abs()
    decided = bool(((gap > 1e-5 * p) | (p < tolerance / 100)).all())
    terms = check(arguments, vocab, chunk_bytes, tolerance, tolerance, check_gradients=decided)
    equal = (arguments["hidden"] == arguments["teacher_hidden"]).all(-1)
    assert torch.equal(terms.l1[equal], torch.zeros_like(terms.l1[equal]))


@pytest.mark.parametrize("latent", ["no latent", "zero latent"])
@pytest.mark.parametrize("heads", ["one head", "two equal heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_distributions_have_exactly_zero_l1(dtype: torch.dtype, heads: str, latent: str) -> None:
    # 7 rows of 33: sizes for which one product of draft and teacher rows together gives them different last bits.
    for rows, width in ((1, 5), (7, 33), (39, 16)):
        arguments = problem(0, rows, 1001, width, 4 if latent == "zero latent" else 0, dtype, padding=0)
        arguments["lm_head"] = arguments["teacher_head"] if heads == "one head" else arguments["teacher_head"].clone()
        equal = torch.arange(rows) % 2 == 0
        hidden = arguments["teacher_hidden"].clone()
        hidden[~equal] += 1
        arguments["hidden"] = hidden.requires_grad_()
        if arguments["latent"] is not None:
            arguments["latent"] = torch.zeros_like(arguments["latent"], requires_grad=True)
        terms = vocab_parallel_ce_l1(**arguments, vocab_size=1001)
        assert terms.l1[equal].tolist() == [0.0] * int(equal.sum())
        assert terms.accept[equal].tolist() == [1.0] * int(equal.sum())
        assert terms.top1_agree[equal].tolist() == [1.0] * int(equal.sum())
        assert rows == 1 or float(terms.l1[~equal].detach().min()) > 0
        # The L1 part adds nothing to the gradient: it is the one of cross-entropy alone.
        (gradient,) = torch.autograd.grad(terms.loss, arguments["hidden"])
        arguments["l1_weight"] = torch.zeros_like(arguments["l1_weight"])
        alone = vocab_parallel_ce_l1(**arguments, vocab_size=1001)
        (expected,) = torch.autograd.grad(alone.loss, arguments["hidden"])
        assert torch.equal(gradient[equal], expected[equal])


def test_a_row_does_not_depend_on_its_chunk() -> None:
    arguments = problem(1, 23, 1203, 8, 3, torch.float64)
    losses, every = [], []
    for chunk_rows in (1, 2, 7, 22, 23, 24, 1000):
        terms = vocab_parallel_ce_l1(**arguments, vocab_size=1203, chunk_bytes=chunk_rows * 2 * 1206 * 8)
        losses.append(terms.loss.detach())
        every.append(gradients(terms.loss, arguments))
    for loss, grads in zip(losses[1:], every[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-14, atol=0)
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, every[0][name], rtol=1e-12, atol=1e-13)


def test_no_denormal_number_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exponents down to -150, as an untrained draft has them, through where FP32 becomes denormal.
    vocab, seen = 1001, []
    arguments = problem(4, 16, vocab, vocab, 0, torch.float32, padding=0)
    arguments["hidden"] = torch.linspace(-150, 0, vocab).repeat(16, 1).requires_grad_()
    arguments["lm_head"] = torch.eye(vocab)
    original = chunk.product

    def watched(left: Tensor, right: Tensor, out: Tensor) -> None:
        seen.append(left.clone())
        original(left, right, out)

    monkeypatch.setattr(chunk, "product", watched)
    check(arguments | {"lm_head": arguments["lm_head"].requires_grad_()}, vocab, None, 1e-5, 1e-5, True)
    slopes = seen[-1].abs()
    assert slopes.shape == (16, vocab)
    assert not ((slopes > 0) & (slopes < torch.finfo(torch.float32).tiny)).any()


def test_padding_is_never_read_and_gets_no_gradient() -> None:
    clean = problem(2, 9, 31, 6, 3, torch.float64, padding=5)
    huge = problem(2, 9, 31, 6, 3, torch.float64, padding=5)
    for name in ("lm_head", "markov_w2", "teacher_head"):
        assert clean[name][31:].isnan().all()
        huge[name].detach()[31:] = 1e30
    ours, theirs = (vocab_parallel_ce_l1(**a, vocab_size=31) for a in (clean, huge))
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.ce, theirs.ce) and torch.equal(ours.l1, theirs.l1)
    one, other = gradients(ours.loss, clean), gradients(theirs.loss, huge)
    for name in TRAINED:
        assert torch.equal(one[name], other[name])
    for name in ("lm_head", "markov_w2"):
        assert not one[name][31:].any() and one[name][:31].any()


def test_upstream_scale_multiplies_the_gradient_and_the_teacher_gets_none() -> None:
    arguments = problem(3, 6, 19, 5, 2, torch.float64)
    for name in ("teacher_hidden", "teacher_head", "ce_weight", "l1_weight"):
        arguments[name].requires_grad_()
    plain = gradients(vocab_parallel_ce_l1(**arguments, vocab_size=19).loss, arguments)
    (vocab_parallel_ce_l1(**arguments, vocab_size=19).loss * 2**16).backward()
    for name in TRAINED:
        assert torch.equal(arguments[name].grad, plain[name] * 2**16)
    for name in ("teacher_hidden", "teacher_head", "ce_weight", "l1_weight"):
        assert arguments[name].grad is None


def test_only_wanted_gradients_are_made() -> None:
    arguments = problem(4, 6, 19, 5, 2, torch.float64)
    everything = gradients(vocab_parallel_ce_l1(**arguments, vocab_size=19).loss, arguments)
    for wanted in TRAINED:
        chosen = {n: v.detach().requires_grad_(n == wanted) if n in TRAINED else v for n, v in arguments.items()}
        loss = vocab_parallel_ce_l1(**chosen, vocab_size=19).loss
        loss.backward()
        torch.testing.assert_close(chosen[wanted].grad, everything[wanted], rtol=1e-13, atol=1e-14)
        assert [name for name in TRAINED if chosen[name].grad is not None] == [wanted]


def test_no_rows_still_give_every_parameter_a_gradient() -> None:
    arguments = problem(5, 0, 19, 5, 2, torch.float32)
    terms = vocab_parallel_ce_l1(**arguments, vocab_size=19)
    terms.loss.backward()
    assert terms.loss == 0 and bool(terms.finite)
    for name in TRAINED:
        assert arguments[name].grad.shape == arguments[name].shape and not arguments[name].grad.any()


def test_what_is_not_finite_shows() -> None:
    for name in ("hidden", "teacher_hidden", "latent"):
        arguments = problem(6, 5, 19, 5, 2, torch.float32)
        arguments[name].detach()[3, 1] = torch.nan if name == "hidden" else torch.inf
        terms = vocab_parallel_ce_l1(**arguments, vocab_size=19)
        assert terms.loss.isnan() and not bool(terms.finite)
        assert (terms.l1.isfinite() & terms.ce.isfinite()).tolist() == [True, True, True, False, True]
    for label in (-1, 19, 21):
        arguments = problem(6, 5, 19, 5, 2, torch.float32)
        arguments["labels"][2] = label
        terms = vocab_parallel_ce_l1(**arguments, vocab_size=19)
        assert terms.loss.isnan() and not bool(terms.finite) and terms.ce.isnan().sum() == 1


class LargestTensor(TorchDispatchMode):
    """Remembers the most entries that any operation's result had, in storage of its own."""

    entries = 0
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("rows", [64, 256, 1024])
def test_nothing_of_rows_times_vocabulary_is_made_or_kept(rows: int) -> None:
    vocab, width, chunk_rows = 1500, 8, 16
    arguments = problem(7, rows, vocab, width, 4, torch.float32, padding=0)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t),
        LargestTensor() as largest,
    ):
        terms = vocab_parallel_ce_l1(**arguments, vocab_size=vocab, chunk_bytes=chunk_rows * 2 * vocab * 4)
        terms.loss.backward()
    # The two buffers of a chunk; with 1024 rows, 1/64 of one matrix of logits.
    assert largest.entries == 2 * chunk_rows * vocab
    assert sorted(t.numel() for t in kept) == sorted([rows * width, rows * 4, vocab * width, vocab * 4])


def test_validation_does_no_gradient_work() -> None:
    arguments = problem(8, 64, 1500, 8, 4, torch.float32)
    with LargestTensor() as training:
        terms = vocab_parallel_ce_l1(**arguments, vocab_size=1500)
    with torch.no_grad(), LargestTensor() as validation:
        without = vocab_parallel_ce_l1(**arguments, vocab_size=1500)
    for name in ("loss", "ce", "l1", "accept", "top1_agree"):
        assert torch.equal(getattr(terms, name), getattr(without, name))
        assert not getattr(without, name).requires_grad
    assert validation.operations <= training.operations - 4 * 6  # sign, product, sum, slopes, and the products
    assert not any(getattr(terms, name).requires_grad for name in ("ce", "l1", "accept", "top1_agree", "finite"))


def test_a_second_backward_is_refused() -> None:
    terms = vocab_parallel_ce_l1(**problem(9, 4, 11, 3, 0, torch.float32), vocab_size=11)
    terms.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        terms.loss.backward()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 4 * RUN + 30).flatmap(
        lambda n: st.sampled_from([n, 4 * RUN, 5 * RUN, 6 * RUN - 1, 7 * RUN + 1])
    ),
    seed=st.integers(0, 1000),
    levels=st.sampled_from([1, 2, 1000]),
)
def test_first_max_is_the_lowest_index(width: int, seed: int, levels: int) -> None:
    logits = torch.randint(levels, (5, width), generator=torch.Generator().manual_seed(seed)).float()
    top, index = first_max(logits)
    assert torch.equal(top, logits.amax(-1)) and torch.equal(index, logits.argmax(-1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"markov_w2": None}, "latent is a tensor but markov_w2 is None"),
        ({"latent": None}, "markov_w2 is a tensor but latent is None"),
        ({"teacher_hidden": torch.zeros(4, 6)}, r"teacher_hidden is \[4, 6\] and teacher_head is \[14, 5\]"),
        ({"teacher_hidden": torch.zeros(3, 5)}, "teacher_hidden has 3 rows and hidden has 4"),
        ({"teacher_head": torch.zeros(15, 5)}, "teacher_head has 15 vocabulary rows and lm_head has 14"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, r"labels is \[5\] but hidden has 4 rows"),
        ({"vocab_size": 15}, "vocab_size is 15 but the LM head holds 14 rows on each of 1 ranks"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(change: dict[str, Any], sentence: str) -> None:
    arguments = problem(10, 4, 11, 5, 2, torch.float32) | {"vocab_size": 11}
    with pytest.raises(DSparkError, match=sentence):
        vocab_parallel_ce_l1(**(arguments | change))
