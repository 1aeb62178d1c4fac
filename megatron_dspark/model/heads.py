"""The sequential head (vanilla Markov, gated, RNN) and the confidence head.

Every sequential head is "a latent of width r, then W2": the logits of slot k get W2 · latent_k added. The latent reads
e = W1[token before the label] and, for two of the three, the backbone's hidden state.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class VocabParallelTable(VocabParallelEmbedding):
    """A [vocabulary, width] matrix sharded by vocabulary, used as an embedding or as an output head by its weight."""

    def __init__(
        self, rows: int, width: int, vocab_size: int, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        @torch.no_grad()
        def initialise(weight: Tensor) -> None:
            # Initialised on the CPU, `weight` is the whole table: how many rows of padding a layout adds must not
            # change what is drawn next. A GPU hands over its own rows, drawn from its own generator.
            config.init_method(weight[:vocab_size])
            weight[vocab_size:].zero_()

        super().__init__(rows, width, init_method=initialise, config=config, tp_group=pg_collection.tp)


class MarkovHead(MegatronModule):
    """Vanilla Markov head: the latent is W1[previous token]. Base of the other two.

    The per-position projections are replicated under tensor parallelism; W1 and W2 are sharded by vocabulary.
    """

    def __init__(
        self,
        config: TransformerConfig,
        padded_vocab_size: int,
        vocab_size: int,
        rank: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.rank = rank
        self.markov_w1 = VocabParallelTable(padded_vocab_size, rank, vocab_size, config, pg_collection)
        self.markov_w2 = VocabParallelTable(padded_vocab_size, rank, vocab_size, config, pg_collection)
        self.add_projections()

    def add_projections(self) -> None:
        """Make what the latent needs beside W1 and W2; the vanilla head needs nothing."""

    def embed(self, previous_ids: Tensor) -> Tensor:
        """Return e = W1[previous_ids], [N, γ, r], for `previous_ids` [N, γ]."""
        return self.markov_w1(previous_ids)

    def latent(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return the latent [N, γ, r] from `hidden` [N, γ, d] (post-norm) and `embedding` [N, γ, r]."""
        return embedding


class GatedMarkovHead(MarkovHead):
    """Gated Markov head: latent = σ(W_g [h; e] + b) ⊙ e."""

    def add_projections(self) -> None:
        """See `MarkovHead.add_projections`."""
        self.gate_proj = replicated_linear(self.config.hidden_size + self.rank, self.rank, self.config)

    def latent(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """See `MarkovHead.latent`."""
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding


class RecurrentHead(MarkovHead):
    """RNN head: (g, c, o) = W_j [s; e; h] + b, s' = σ(g) ⊙ s + (1 − σ(g)) ⊙ tanh(c), latent = tanh(o), s_0 = 0."""

    def add_projections(self) -> None:
        """See `MarkovHead.add_projections`."""
        self.joint_proj = replicated_linear(2 * self.rank + self.config.hidden_size, 3 * self.rank, self.config)

    def latent(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """See `MarkovHead.latent`."""
        weight, bias = self.joint_proj.weight, self.joint_proj.bias
        # What does not depend on the state is one product for the whole block.
        fixed = torch.nn.functional.linear(torch.cat([embedding, hidden], dim=-1), weight[:, self.rank :], bias)
        state = torch.zeros_like(embedding[:, 0])
        latents = []
        for slot in range(embedding.shape[1]):
            joint = fixed[:, slot] + torch.nn.functional.linear(state, weight[:, : self.rank])
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latents.append(torch.tanh(output))
        return torch.stack(latents, dim=1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentHead}


class ConfidenceHead(MegatronModule):
    """Predicts each slot's acceptance: logit = w · features + b, computed in FP32 at least."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__(config)
        self.proj = replicated_linear(width, 1, config)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits [...] for `features` [..., width]."""
        wide = torch.promote_types(features.dtype, torch.float32)
        logits = torch.nn.functional.linear(features.to(wide), self.proj.weight.to(wide), self.proj.bias.to(wide))
        return logits.squeeze(-1)


def replicated_linear(inputs: int, outputs: int, config: TransformerConfig) -> torch.nn.Linear:
    """Return a linear layer with bias that every tensor-parallel rank holds whole, initialised alike on all of them."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    linear = torch.nn.Linear(inputs, outputs, device=device, dtype=config.params_dtype)
    with torch.no_grad():
        config.init_method(linear.weight)
        linear.bias.zero_()
    return linear
