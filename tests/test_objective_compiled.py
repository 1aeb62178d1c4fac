"""The compiled kernel gives what the eager one gives: every type, any number of rows, any sharding, and refuses."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dspark.errors import DSparkError
from megatron_dspark.objective import compiled
from megatron_dspark.objective.fused import VocabTerms, vocab_parallel_ce_l1
from megatron_dspark.training.run import train
from tests.distributed import RankPool
from tests.test_objective_fused import TRAINED, check, gradients, problem
from tests.test_training import tiny_settings

STATISTICS = ("loss", "ce", "l1", "accept", "top1_agree")


@pytest.fixture(autouse=True, scope="module")
def compile_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile in this process, where a pool is slower, and into a folder of its own.

    A process that is killed while it compiles leaves half a library in the shared folder, and the next one loads it.
    """
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(compile_threads=1):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def both(arguments: dict[str, Any], vocab: int, **options: Any) -> tuple[VocabTerms, VocabTerms]:
    eager, ours = (
        vocab_parallel_ce_l1(**arguments, vocab_size=vocab, kernel=kernel, **options)
        for kernel in ("eager", "compiled")
    )
    return eager, ours


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_number_of_rows_in_any_chunks(dtype: torch.dtype) -> None:
    vocab, tolerance = 333, 1e-12 if dtype == torch.float64 else 2e-6
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    for seed, (rows, rank, chunk_rows, scale) in enumerate(
        [(19, 4, 7, 1.0), (20, 0, 20, 5.0), (1, 4, 5, 1.0), (6, 4, 2, 1e3), (0, 4, 5, 1.0)]
    ):
        arguments = problem(seed, rows, vocab, 9, rank, dtype, scale)
        size = 8 if dtype == torch.float64 else 4
        eager, ours = both(arguments, vocab, chunk_bytes=chunk_rows * 2 * (vocab + 3) * size)
        for name in STATISTICS:
            assert getattr(ours, name).dtype == getattr(eager, name).dtype
            torch.testing.assert_close(getattr(ours, name), getattr(eager, name), rtol=tolerance, atol=tolerance)
        expected, got = gradients(eager.loss, arguments), gradients(ours.loss, arguments)
        for name in got:
            scale_of = max([1.0, *expected[name].abs().flatten().tolist()])
            torch.testing.assert_close(got[name] / scale_of, expected[name] / scale_of, rtol=rounding, atol=rounding)
    if dtype == torch.float64:
        # And against the materialized reference, not only against the other kernel.
        patched = functools.partial(vocab_parallel_ce_l1, kernel="compiled")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.test_objective_fused.vocab_parallel_ce_l1", patched)
            check(problem(9, 19, vocab, 9, 4, dtype), vocab, None, 1e-9, 1e-11, check_gradients=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_ties_and_equal_rows(dtype: torch.dtype) -> None:
    vocab = 333
    draft = torch.randn(7, vocab, dtype=dtype, generator=torch.Generator().manual_seed(0))
    teacher = draft.clone()
    draft[1], teacher[1] = 0.0, 0.0
    draft[2, 5], teacher[2, 7] = 1e4, 1e4  # one-hot, disjoint
    draft[3, [4, 300]], teacher[3, [4, 9]] = 50.0, 50.0  # ties: the lowest id of both is 4
    draft[4, [5, 300]], teacher[4, [4, 300]] = 50.0, 50.0
    draft[5] = -1e4
    arguments = {
        "hidden": draft.requires_grad_(),
        "latent": None,
        "lm_head": torch.eye(vocab, dtype=dtype),
        "markov_w2": None,
        "teacher_hidden": teacher,
        "teacher_head": torch.eye(vocab, dtype=dtype),
        "labels": torch.tensor([3, 0, 5, 4, 300, 1, 332]),
        "ce_weight": torch.ones(7, dtype=dtype),
        "l1_weight": torch.ones(7, dtype=dtype),
    }
    eager, ours = both(arguments, vocab)
    for name in STATISTICS:
        torch.testing.assert_close(getattr(ours, name), getattr(eager, name), rtol=2e-6, atol=2e-6)
    assert ours.l1[[0, 1, 6]].tolist() == [0.0, 0.0, 0.0] and ours.l1[2] == 2.0
    assert ours.top1_agree.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, float(teacher[5].argmax() == 0), 1.0]
    (expected,), (got,) = (torch.autograd.grad(terms.loss, arguments["hidden"]) for terms in (eager, ours))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    # Where p equals q the gradient is exactly that of cross-entropy alone.
    arguments["l1_weight"] = torch.zeros(7, dtype=dtype)
    alone = vocab_parallel_ce_l1(**arguments, vocab_size=vocab, kernel="compiled")
    (alone_gradient,) = torch.autograd.grad(alone.loss, arguments["hidden"])
    assert torch.equal(got[[0, 1, 6]], alone_gradient[[0, 1, 6]])


def test_what_is_not_finite_shows() -> None:
    arguments = problem(6, 19, 333, 9, 4, torch.float32)
    arguments["hidden"].detach()[3, 1] = torch.nan
    arguments["teacher_hidden"].detach()[5, 1] = torch.inf
    arguments["labels"][7] = 333
    eager, ours = both(arguments, 333)
    assert not bool(ours.finite) and ours.loss.isnan()
    for name in ("ce", "l1"):
        assert torch.equal(getattr(ours, name).isfinite(), getattr(eager, name).isfinite())


def sharded(rank: int, ranks: int, kernel: str, folder: str) -> dict[str, Any]:
    """Terms and gradients of one rank; the last of the ranks holds padding only."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    torch._inductor.config.compile_threads = 1
    arguments = problem(3, 19, 333, 9, 4, torch.float64, padding=333)
    for name in ("lm_head", "markov_w2", "teacher_head"):
        share = arguments[name].detach().chunk(ranks)[rank].clone()
        arguments[name] = share.requires_grad_(name != "teacher_head")
    terms = vocab_parallel_ce_l1(
        **arguments, vocab_size=333, kernel=kernel, chunk_bytes=5 * 2 * 2 * 333 * 8, tp_group=dist.group.WORLD
    )
    return {name: getattr(terms, name).detach() for name in STATISTICS} | gradients(terms.loss, arguments)


def test_vocabulary_shards(two_ranks: RankPool, tmp_path: Path) -> None:
    eager, ours = (two_ranks.run(sharded, kernel, str(tmp_path)) for kernel in ("eager", "compiled"))
    for expected, got in zip(eager, ours, strict=True):
        assert set(TRAINED) < got.keys()
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)
    assert torch.equal(ours[0]["hidden"], ours[1]["hidden"])


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = problem(1, 3, 11, 5, 0, torch.float32)
    with pytest.raises(DSparkError, match="kernel is 'triton' and must be one of eager, compiled"):
        vocab_parallel_ce_l1(**arguments, vocab_size=11, kernel="triton")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DSparkError, match=r"C\+\+ compiler no-such-compiler is not installed"):
        vocab_parallel_ce_l1(**arguments, vocab_size=11, kernel="compiled")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DSparkError, match="triton is not installed"):
        compiled.check_kernel("compiled", on_gpu=True)


def test_compiled_runs_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(function: Any) -> Any:
        raise AssertionError("compiled without being asked to")

    monkeypatch.setattr(compiled, "compiled", never)
    arguments = problem(1, 3, 11, 5, 0, torch.float32)
    vocab_parallel_ce_l1(**arguments, vocab_size=11)
    with pytest.raises(AssertionError, match="without being asked"):
        vocab_parallel_ce_l1(**arguments, vocab_size=11, kernel="compiled")


def test_a_training_run_with_it(tmp_path: Path) -> None:
    # Also through what stands in for CUDA: torch.compile looks at every function of torch.cuda.
    reports = {}
    for kernel in ("eager", "compiled"):
        changes = {"objective.kernel": kernel, "steps": 2, "save_interval": 2}
        reports[kernel] = train(tiny_settings(tmp_path / kernel, **changes))
    for split in ("train", "validation"):
        ours, expected = getattr(reports["compiled"], split), getattr(reports["eager"], split)
        for name in ("loss", "tau", "l1_loss", "accept_rate"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    # How it is computed may change when a run goes on.
    changes = {"objective.kernel": "eager", "objective.chunk_bytes": 10**6, "steps": 3}
    assert train(tiny_settings(tmp_path / "compiled", **changes)).steps == 3
    with pytest.raises(DSparkError, match=r"objective\.ce_weight was"):
        train(tiny_settings(tmp_path / "compiled", **{"objective.ce_weight": 0.2, "steps": 4}))
