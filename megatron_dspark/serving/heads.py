"""The sequential head and the confidence head, one slot at a time, as serving runs them."""

import torch
from torch import nn

from megatron_dspark.serving.precision import at_least_float32


class MarkovHead(nn.Module):
    """What the previous token says about the next: a latent of width r, then W2.

    Args:
        kind: "vanilla", "gated" or "rnn".
        rank: r.
    """

    def __init__(self, kind: str, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self, previous: int, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One slot.

        Args:
            previous: the token before this slot's: the anchor for slot 0, then the slot before's proposal.
            hidden: the slot's post-norm hidden state, [hidden_size].
            state: what the step before returned; None for slot 0.

        Returns:
            (the bias to add to the slot's logits [vocab_size], the state for the next slot).
        """
        latent = self.markov_w1.weight[previous]
        if self.kind == "gated":
            latent = torch.sigmoid(self.gate_proj(torch.cat((hidden, latent)))) * latent
        elif self.kind == "rnn":
            if state is None:
                state = torch.zeros_like(latent)
            gate, candidate, output = self.joint_proj(torch.cat((state, latent, hidden))).chunk(3)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(output)
        return self.markov_w2(latent), state


class ConfidenceHead(nn.Module):
    """Predicts whether a slot's proposal will be accepted, given that those before it were."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, width] to logits [rows], computed in FP32 or better."""
        dtype = at_least_float32(features.dtype)
        return features.to(dtype) @ self.proj.weight[0].to(dtype) + self.proj.bias.to(dtype)
