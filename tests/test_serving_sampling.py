"""Speculative sampling leaves the target's distribution unchanged: exactly, by enumeration, and by chi-square.

The enumeration runs the shipped functions on one point of every cell of the uniforms on which they are constant, so it
sums probabilities instead of sampling them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from scipy import stats

from megatron_dspark.errors import DSparkError
from megatron_dspark.sampling import SamplingSettings, UniformStream, distribution, draw
from megatron_dspark.serving import acceptance
from megatron_dspark.serving.acceptance import verify_sampled
from megatron_dspark.serving.target import Target
from megatron_dspark.serving.verify import generate
from tests.serving_support import agreeing_draft, tiny_model

Model = Callable[[tuple[int, ...]], torch.Tensor]


def cells(edges: Iterable[float]) -> list[tuple[float, float]]:
    """(a point, the length) of every interval that `edges` cut [0, 1) into."""
    cuts = sorted({0.0, 1.0, *(edge for edge in edges if 0 < edge < 1)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(cuts)]


def cdf_edges(mass: torch.Tensor) -> list[float]:
    return (mass.cumsum(0) / mass.sum()).tolist() if float(mass.sum()) > 0 else []


def output_distribution(target: Model, draft: Model) -> dict[tuple[int, ...], float]:
    """The exact distribution of three tokens when one block of two proposals is drafted, verified and, where it
    committed fewer than three, continued by the target alone."""
    outputs: dict[tuple[int, ...], float] = defaultdict(float)
    first_q = draft(())
    for first_point, first_length in cells(cdf_edges(first_q)):
        first = draw(first_q, first_point)
        second_q = draft((first,))
        for second_point, second_length in cells(cdf_edges(second_q)):
            second = draw(second_q, second_point)
            p = torch.stack([target(()), target((first,)), target((first, second))])
            q = torch.stack([first_q, second_q])
            final = cdf_edges((p[0] - q[0]).clamp_min(0)) + cdf_edges((p[1] - q[1]).clamp_min(0))
            final += cdf_edges(p[0]) + cdf_edges(p[1]) + cdf_edges(p[2])
            tests = [cells([float(p[slot, token] / q[slot, token])]) for slot, token in enumerate((first, second))]
            for drawn in itertools.product(*tests, cells(final)):
                weight = first_length * second_length * math.prod(length for _, length in drawn)
                accepted, following = verify_sampled(p, q, [first, second], [at for at, _ in drawn])
                outputs[(*(first, second)[:accepted], following)] += weight
    return continued(outputs, target, 3)


def continued(outputs: dict[tuple[int, ...], float], target: Model, length: int) -> dict[tuple[int, ...], float]:
    """Sequences shorter than `length` extended by the target's own distribution."""
    complete: dict[tuple[int, ...], float] = defaultdict(float)
    pending = list(outputs.items())
    while pending:
        sequence, weight = pending.pop()
        if len(sequence) == length:
            complete[sequence] += weight
        else:
            pending += [((*sequence, token), weight * float(p)) for token, p in enumerate(target(sequence))]
    return complete


def distance(target: Model, draft: Model) -> float:
    """Largest difference between what speculative decoding emits and what the target alone emits."""
    emitted, alone = output_distribution(target, draft), continued({(): 1.0}, target, 3)
    return max(abs(emitted.get(sequence, 0.0) - weight) for sequence, weight in alone.items())


def random_model(seed: int, size: int, sharpness: float) -> Model:
    """A distribution over `size` tokens for every context, drawn once."""
    table: dict[tuple[int, ...], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)

    def model(context: tuple[int, ...]) -> torch.Tensor:
        if context not in table:
            table[context] = torch.softmax(
                sharpness * torch.randn(size, generator=generator, dtype=torch.float64), dim=-1
            )
        return table[context]

    return model


def constant(*mass: float) -> Model:
    probabilities = torch.tensor(mass, dtype=torch.float64)
    return lambda _: probabilities


CASES = {
    "unrelated": (random_model(1, 4, 1.0), random_model(2, 4, 1.0)),
    "sharp": (random_model(3, 3, 6.0), random_model(4, 3, 6.0)),
    "identical": (random_model(5, 4, 1.0), random_model(5, 4, 1.0)),
    "nearly disjoint": (constant(1 - 2e-6, 1e-6, 1e-6), constant(1e-6, 1e-6, 1 - 2e-6)),
    "disjoint": (constant(0.5, 0.5, 0.0, 0.0), constant(0.0, 0.0, 0.5, 0.5)),
    "truncated draft": (random_model(6, 4, 1.0), constant(0.0, 0.9, 0.1, 0.0)),
    "truncated target": (constant(0.0, 0.9, 0.1, 0.0), random_model(7, 4, 1.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_output_distribution_is_exactly_the_targets(case: str) -> None:
    assert distance(*CASES[case]) < 1e-12


@pytest.mark.parametrize("wrong", ["residual is p", "residual is uniform over the rest"])
def test_a_wrong_residual_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """The enumeration is able to fail: plausible mistakes move the distribution."""
    rules = {
        "residual is p": lambda p, q: p,
        "residual is uniform over the rest": lambda p, q: ((p - q) > 0).double(),
    }
    monkeypatch.setattr(acceptance, "residual", rules[wrong])
    assert distance(*CASES["unrelated"]) > 1e-3


def test_residual_without_mass_falls_back_to_the_target() -> None:
    """p and q equal up to rounding: the residual is empty and p is drawn from."""
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    q = torch.tensor([0.25, math.nextafter(0.75, 1.0)], dtype=torch.float64)
    assert float((p - q).clamp_min(0).sum()) == 0
    accepted, token = verify_sampled(p[None].repeat(2, 1), q[None], [1], [math.nextafter(1.0, 0.0), 0.1])
    assert (accepted, token) == (0, 0)


@pytest.mark.parametrize("overlap", ["near", "nearly disjoint"])
def test_chi_square_on_a_larger_vocabulary(overlap: str) -> None:
    """8,000 requests of their own seeds, 500 tokens, a Zipf target: the first two tokens follow p."""
    size, requests = 500, 8_000
    zipf = 1 / torch.arange(1, size + 1, dtype=torch.float64)
    p = (zipf / zipf.sum()).repeat(3, 1)
    shift = 3 if overlap == "near" else size // 2
    q = (zipf.roll(shift) if overlap == "near" else zipf.roll(shift) ** 3)[None].repeat(2, 1)
    q = q / q.sum(-1, keepdim=True)
    firsts, seconds = torch.zeros(size), torch.zeros(size)
    for request in range(requests):
        numbers = UniformStream(11, f"request {request}").take(6)
        proposals = [draw(q[0], numbers[0]), draw(q[1], numbers[1])]
        accepted, following = verify_sampled(p, q, proposals, numbers[2:5])
        tokens = [*proposals[:accepted], following]
        firsts[tokens[0]] += 1
        # A block that committed one token is continued by the target's own draw.
        seconds[tokens[1] if len(tokens) > 1 else draw(p[0], numbers[5])] += 1
    for counts in (firsts, seconds):
        # Tokens too rare for the chi-square approximation share one cell.
        frequent = p[0] * requests >= 8
        observed = [*counts[frequent].tolist(), float(counts[~frequent].sum())]
        expected = [*(p[0][frequent] * requests).tolist(), float(p[0][~frequent].sum() * requests)]
        assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_chi_square_of_whole_requests(tmp_path: Path) -> None:
    """Responses of a real target and a poor draft, at temperature 0.8 and top-p 0.9, follow the target's own law."""
    vocabulary, requests, settings = 5, 600, SamplingSettings(temperature=0.8, top_p=0.9)
    model = tiny_model(
        "qwen3", vocab_size=vocabulary, num_hidden_layers=2, seed=4, context=0.3, eos_token_id=None, pad_token_id=None
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    target = Target(model)
    shape = {"block_size": 2, "mask_token_id": 0, "num_target_layers": 2, "target_layer_ids": [0, 1]}
    draft = agreeing_draft(model, tmp_path / "draft", noise=0.3, num_hidden_layers=1, layer_types=..., **shape)
    prompt, counts, accepted, blocks = [1, 3, 2], defaultdict(int), 0, 0
    for request in range(requests):
        result = generate(
            target, draft, prompt, settings=settings, max_new_tokens=3, uniforms=UniformStream(0, str(request))
        )
        counts[tuple(result.token_ids)] += 1
        accepted += sum(block.accepted for block in result.blocks)
        blocks += len(result.blocks)
    assert 0.1 < accepted / (2 * blocks) < 0.95, "the draft must sometimes be right and sometimes wrong"

    def law(sequence: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *sequence]])).logits[0, -1]
        return distribution(logits, settings)

    alone = continued({(): 1.0}, law, 3)
    assert all(alone[sequence] > 0 for sequence in counts), "a sequence the target never emits was emitted"
    frequent = [sequence for sequence, weight in alone.items() if weight * requests >= 8]
    rare = 1 - sum(alone[sequence] for sequence in frequent)
    observed = [counts[sequence] for sequence in frequent] + [requests - sum(counts[s] for s in frequent)]
    expected = [alone[sequence] * requests for sequence in frequent] + [rare * requests]
    assert len(frequent) > 10
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_rule_order_and_ties() -> None:
    """Temperature, then top-k, then top-p of what is left; ties with the last kept token stay."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1], dtype=torch.float64))
    probabilities = distribution(logits, SamplingSettings(temperature=1.0, top_k=2))
    torch.testing.assert_close(probabilities, torch.tensor([4 / 7, 3 / 7, 0, 0, 0], dtype=torch.float64))
    probabilities = distribution(logits, SamplingSettings(temperature=1.0, top_k=3))
    torch.testing.assert_close(probabilities, torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1], dtype=torch.float64))
    # After top-k 2 the first token holds 4/7 = 0.571: a nucleus of 0.57 is that token alone.
    probabilities = distribution(logits, SamplingSettings(temperature=1.0, top_k=2, top_p=0.57))
    torch.testing.assert_close(probabilities, torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64))
    probabilities = distribution(logits, SamplingSettings(temperature=0.5))
    squared = torch.tensor([16.0, 9, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(probabilities, squared / squared.sum())


def test_a_wide_nucleus_needs_the_full_sort() -> None:
    """Past the first 256 tokens the nucleus is still the smallest set that reaches top-p."""
    logits = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = distribution(logits, SamplingSettings(temperature=5.0, top_p=0.9))
    for row, all_probabilities in zip(kept, torch.softmax(logits / 5, -1), strict=True):
        mass = all_probabilities[row > 0]
        assert 256 < len(mass) < 2000
        assert float(mass.sum()) >= 0.9 > float(mass.sum() - mass.min())
        assert float(mass.min()) > float(all_probabilities[row == 0].max())


def test_draw_never_returns_an_impossible_token() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    almost_one = math.nextafter(1.0, 0.0)
    assert [draw(probabilities, uniform) for uniform in (0.0, 0.4999, 0.5, almost_one)] == [1, 1, 3, 3]
    # The cumulative sum of a long vector rounds: the largest uniform still finds a token with mass.
    long = torch.full((10_001,), 0.1, dtype=torch.float64)
    long[-1] = 0
    assert draw(long, almost_one) == 9_999
    with pytest.raises(DSparkError, match="NaN or infinity"):
        draw(torch.tensor([math.nan, 0.5], dtype=torch.float64), 0.3)


def test_uniforms_depend_on_the_seed_and_the_request_alone() -> None:
    first = UniformStream(7, "a").take(6)
    interleaved, other = UniformStream(7, "a"), UniformStream(7, "b")
    pieces = []
    for count in (1, 2, 3):
        other.take(5)
        pieces += interleaved.take(count)
    assert pieces == first
    assert UniformStream(7, "b").take(6) != first
    assert UniformStream(8, "a").take(6) != first


@pytest.mark.parametrize(
    "setting", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_impossible_settings_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(DSparkError, match=next(iter(setting))):
        SamplingSettings(**setting)
