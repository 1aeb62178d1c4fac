"""The acceptance rule: which proposals survive, and what replaces the first that does not.

Speculative sampling is Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318), as the DSpark paper
(arXiv:2607.05147) uses it. The output is distributed as the target's own under the request's sampling rule.
"""

from collections.abc import Sequence

import torch

from megatron_dspark.sampling import draw


def residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """What replaces a rejected proposal: max(p - q, 0), not normalised (`draw` scales).

    Args:
        target: p, [vocab_size].
        draft: q, [vocab_size].

    A rejection needs some q(x) > p(x), so p must exceed q elsewhere and the mass is positive; it can only be 0 when p
    and q are equal up to rounding, and then p itself is the right distribution.
    """
    difference = (target - draft).clamp_min(0.0)
    return difference if float(difference.sum()) > 0 else target


def verify_greedy(target_choices: Sequence[int], proposals: Sequence[int]) -> tuple[int, int]:
    """The longest prefix of proposals that the target would have chosen itself, then the target's own token.

    Args:
        target_choices: arg-max of the target after the anchor and after each proposal, `len(proposals) + 1` tokens.
        proposals: the draft's tokens.

    Returns:
        (number of accepted proposals, the correction or bonus token). A match after the first mismatch never counts.
    """
    accepted = 0
    while accepted < len(proposals) and proposals[accepted] == target_choices[accepted]:
        accepted += 1
    return accepted, target_choices[accepted]


def verify_sampled(
    target: torch.Tensor, draft: torch.Tensor, proposals: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, int]:
    """Accept or replace sampled proposals so that the output is distributed as the target's own.

    Args:
        target: p after the anchor and after each proposal, [width + 1, vocab_size].
        draft: q that each proposal was drawn from, [width, vocab_size].
        proposals: `width` tokens, proposal k drawn from q_k.
        uniforms: `width + 1` numbers: one acceptance test a proposal (all are consumed, whatever is accepted, so that
            the stream's use does not depend on the outcome), then one for the residual or bonus token.

    Returns:
        (number of accepted proposals, the residual's or the bonus token).
    """
    width = len(proposals)
    index = torch.tensor(proposals, device=target.device)[:, None]
    target_mass = target[:width].gather(1, index)[:, 0].tolist()
    draft_mass = draft.gather(1, index)[:, 0].tolist()
    for slot in range(width):
        # u < p/q without the division; p = 0 is never accepted, p >= q always.
        if not uniforms[slot] * draft_mass[slot] < target_mass[slot]:
            return slot, draw(residual(target[slot], draft[slot]), uniforms[width])
    return width, draw(target[width], uniforms[width])
