"""On a GPU both kernels equal the float64 reference, in bf16 through tensor cores and in FP32."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dspark.objective.fused import vocab_parallel_ce_l1
from tests.test_objective_fused import gradients, problem, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    moved = {}
    for name, value in arguments.items():
        moved[name] = value
        if isinstance(value, Tensor):
            moved[name] = value.detach().cuda().requires_grad_(value.requires_grad)
    return moved


@pytest.mark.parametrize("kernel", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "vocab", "rank"), [(37, 5003, 16), (256, 1024, 0), (1, 333, 8)])
def test_terms_and_gradients(kernel: str, dtype: torch.dtype, rows: int, vocab: int, rank: int) -> None:
    arguments = problem(0, rows, vocab, 64, rank, dtype, scale=0.3, padding=5)
    ce, l1, _, expected = reference(arguments, vocab)
    moved = on_gpu(arguments)
    size = 8 if dtype == torch.float64 else 4
    for chunk_bytes in (None, 16 * 2 * (vocab + 5) * size):
        terms = vocab_parallel_ce_l1(**moved, vocab_size=vocab, kernel=kernel, chunk_bytes=chunk_bytes)
        exact = 1e-10 if dtype == torch.float64 else 5e-5
        torch.testing.assert_close(terms.ce.double().cpu(), ce.detach(), rtol=exact, atol=exact)
        torch.testing.assert_close(terms.l1.double().cpu(), l1.detach(), rtol=exact, atol=exact)
        # With bf16 inputs the logits' gradient is rounded to bf16 before it is multiplied.
        rounding = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
        for name, gradient in gradients(terms.loss, moved).items():
            scale = float(expected[name].abs().max())
            error = (gradient.double().cpu() - expected[name]).abs().max()
            assert float(error) <= rounding * scale, name


@pytest.mark.parametrize("kernel", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_distributions_have_exactly_zero_l1(kernel: str, dtype: torch.dtype) -> None:
    arguments = on_gpu(problem(1, 64, 5003, 64, 0, dtype, padding=0))
    arguments["lm_head"] = arguments["teacher_head"]
    arguments["hidden"] = arguments["teacher_hidden"].clone().requires_grad_()
    terms = vocab_parallel_ce_l1(**arguments, vocab_size=5003, kernel=kernel)
    assert not terms.l1.any() and bool((terms.top1_agree == 1).all())


@pytest.mark.parametrize("kernel", ["eager", "compiled"])
def test_memory_is_a_few_chunks(kernel: str) -> None:
    rows, vocab, chunk_bytes = 2048, 32_000, 64 * 2**20
    arguments = on_gpu(problem(2, rows, vocab, 128, 0, torch.bfloat16, padding=0))
    arguments["lm_head"].requires_grad_(False)
    for _ in range(2):  # the first one compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        vocab_parallel_ce_l1(**arguments, vocab_size=vocab, kernel=kernel, chunk_bytes=chunk_bytes).loss.backward()
        arguments["hidden"].grad = None
    # The logits of one matrix alone would be 250 MiB.
    assert torch.cuda.max_memory_allocated() - before < 3 * chunk_bytes
