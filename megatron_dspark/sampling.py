"""From logits to a token: the rule of a request (temperature, top-k, top-p) and its own random numbers.

Data is generated and served by this one rule, so that both mean the same by a temperature. Everything random is a
function of an explicit stream of uniform numbers: a decode can be replayed number by number, and a test can enumerate
it.
"""

import hashlib
import math
from dataclasses import dataclass

import torch

from megatron_dspark.errors import DSparkError

# Nearly every nucleus fits; a wider one is sorted in full. The answer is the same either way.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True)
class SamplingSettings:
    """A request's sampling rule, applied in this order: temperature, top-k, top-p.

    Attributes:
        temperature: divides the logits; 0 means greedy (arg-max), and then top-k and top-p have no effect.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.

    Tokens that tie with the last one kept are kept too, so the rule does not depend on the order of equal logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise DSparkError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise DSparkError(f"top_k is {self.top_k}; it must be 0 (keep every token) or the number of tokens to keep")
        if not 0 < self.top_p <= 1:
            raise DSparkError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (keep every token)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class UniformStream:
    """The random numbers of one request: the next `n` uniforms in [0, 1), in FP64.

    The numbers depend on (seed, request id) alone, so what a request gives does not depend on its neighbours, on
    their number or on their order.
    """

    def __init__(self, seed: int, request_id: str) -> None:
        digest = hashlib.sha256(f"{seed}\n{request_id}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))

    def take(self, count: int) -> list[float]:
        """The next `count` numbers."""
        return torch.rand(count, dtype=torch.float64, generator=self._generator).tolist()


def distribution(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """What a sampled request draws from.

    Args:
        logits: [..., vocab_size], any floating dtype.
        settings: the request's rule; not greedy.

    Returns:
        FP64 probabilities [..., vocab_size]: the acceptance rule compares p with q, and FP64 keeps the error of
        their difference far below anything a draw can resolve.
    """
    if 0 < settings.top_k < logits.shape[-1]:
        # Temperature does not change the order, and selecting is faster in the logits' own dtype.
        threshold = logits.topk(settings.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    probabilities = torch.softmax(logits.double() / settings.temperature, dim=-1)
    if settings.top_p < 1:
        threshold = _nucleus_threshold(probabilities, settings.top_p)
        probabilities = probabilities.masked_fill(probabilities < threshold, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def _nucleus_threshold(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest probability inside the nucleus, [..., 1]."""
    ordered = probabilities.topk(min(_NUCLEUS_GUESS, probabilities.shape[-1]), dim=-1).values
    threshold = _smallest_kept(ordered, top_p)
    wider = ordered.sum(-1) < top_p
    if bool(wider.any()):
        threshold[wider] = _smallest_kept(probabilities[wider].sort(dim=-1, descending=True).values, top_p)
    return threshold


def _smallest_kept(ordered: torch.Tensor, top_p: float) -> torch.Tensor:
    """Of probabilities in falling order, the last one before which less than `top_p` has been reached, [..., 1]."""
    mass_before = ordered.cumsum(-1) - ordered
    return ordered.gather(-1, (mass_before < top_p).sum(-1, keepdim=True) - 1)


def draw(probabilities: torch.Tensor, uniform: float) -> int:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds `uniform`.

    Args:
        probabilities: [vocab_size], non-negative; need not sum to exactly 1 (the uniform is scaled by the sum).
        uniform: in [0, 1).

    Raises:
        DSparkError: the probabilities are not numbers or sum to 0 (the model produced NaN or infinite logits).
    """
    cumulative = probabilities.cumsum(0)
    total = float(cumulative[-1])
    if not (math.isfinite(total) and total > 0):
        raise DSparkError(f"a model gave probabilities that sum to {total}; its logits contain NaN or infinity")
    token = int(torch.searchsorted(cumulative, uniform * total, right=True))
    if token == len(cumulative):  # uniform * total rounded up to the total: the last token that can be drawn
        token = int(probabilities.nonzero()[-1])
    return token
