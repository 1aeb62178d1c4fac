"""The draft as it is served: read from an exported folder, one request at a time.

Written from the paper (arXiv:2607.05147) and the released tensors, not from the training model. A block is drafted in
two moves: one parallel pass of the backbone over [anchor, mask, ...], then the sequential head from left to right, so
that proposal k knows proposal k - 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, require_folder
from megatron_dspark.serving.draft_config import DraftConfig
from megatron_dspark.serving.heads import ConfidenceHead, MarkovHead
from megatron_dspark.serving.precision import at_least_float32, vocabulary_logits


class DraftContext:
    """The draft's memory of one request: keys and values of every committed target row, in every draft layer.

    The buffers have room for one block behind the context: a block's own keys and values are written there, attended
    to and forgotten, so a drafted block leaves no trace.

    Attributes:
        length: rows held = the position of the next anchor. Only committed rows are ever appended.
    """

    def __init__(self, config: DraftConfig, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (1, config.num_key_value_heads, capacity + config.block_size, config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.empty_like(keys) for keys in self.keys]
        self.length = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put rows [1, kv_heads, rows, head_dim] behind the context; return the context with them."""
        end = self.length + keys.shape[2]
        self.keys[layer][:, :, self.length : end] = keys
        self.values[layer][:, :, self.length : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


@dataclass
class Proposal:
    """A drafted block of `width` tokens (width may be below γ).

    Attributes:
        tokens: the proposals, drawn left to right.
        hidden: post-norm hidden states, [width, hidden_size].
        base_logits: the language-model head's logits, without the sequential head, [width, vocab_size].
        logits: what each proposal was chosen from, [width, vocab_size].
        confidence: predicted acceptance as logits, [width], or None when the draft has no confidence head.
    """

    tokens: list[int]
    hidden: torch.Tensor
    base_logits: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the division in FP32 or better."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(at_least_float32(x.dtype))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, first half against second half (the Llama and Qwen3 pairing).

    Args:
        x: [1, heads, rows, head_dim].
        cosine: [rows, head_dim], of each row's position; `sine` likewise.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Grouped-query attention with q/k norm; keys and values come from the block and from the target's features."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows [rows, hidden_size] to rotated keys and values, each [1, kv_heads, rows, head_dim]."""
        keys = self.k_norm(self._heads(self.k_proj(x)))
        return rotate(keys, cosine, sine), self._heads(self.v_proj(x))

    def forward(
        self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, context: DraftContext, layer: int
    ) -> torch.Tensor:
        """The block's rows [γ, hidden_size] see the whole context and the whole block, in both directions."""
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), cosine, sine)
        keys, values = context.write(layer, *self.keys_values(x, cosine, sine))
        attended = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        return self.o_proj(attended[0].transpose(0, 1).flatten(1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm decoder layer of the draft."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, context: DraftContext, layer: int
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine, context, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """A dense DSpark drafter in the DeepSpec layout; parameter names are the file's names."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.markov_head = MarkovHead(
            config.markov_head_type, config.vocab_size, config.hidden_size, config.markov_rank
        )
        self.confidence_head = None
        if config.enable_confidence_head:
            markov_width = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + markov_width)

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype, device: torch.device) -> "DraftModel":
        """Load an exported draft folder.

        Args:
            folder: holds config.json and model.safetensors (or its index and parts).
            dtype: what to compute in; the stored tensors are converted.

        Raises:
            DSparkError: a file is missing or damaged, or a tensor is missing, unknown or has another shape than the
                config says.
        """
        folder = Path(folder)
        require_folder(folder, "the draft folder", "give the folder that the export wrote")
        config = DraftConfig.read(folder)
        tensors = _read_tensors(folder)
        with torch.device("meta"):
            model = cls(config)
        _check_tensors(model, tensors, folder)
        model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
        model.prepare_rotary(device)
        return model.eval().requires_grad_(False)

    def prepare_rotary(self, device: torch.device) -> None:
        """Compute the rotary frequencies, in FP32 as transformers does (a draft trained with them depends on it)."""
        config, parameters = self.config, self.config.rope_parameters
        if parameters["rope_type"] == "default":
            exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
            self.inverse_frequencies, self.rotary_scale = 1.0 / parameters["rope_theta"] ** exponents, 1.0
            return
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        described = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(parameters),
        )
        scaled = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](described, device)
        self.inverse_frequencies, self.rotary_scale = scaled

    def new_context(self, capacity: int) -> DraftContext:
        """An empty context for one request of at most `capacity` positions."""
        return DraftContext(self.config, capacity, self.fc.weight.dtype, self.fc.weight.device)

    def extend_context(self, context: DraftContext, features: torch.Tensor) -> None:
        """Append committed target rows to the context.

        Args:
            context: holds rows 0 … length - 1.
            features: the taps of rows length … length + rows - 1, concatenated in tap order,
                [rows, taps * hidden_size].
        """
        rows = features.shape[0]
        x = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        cosine, sine = self._rotary(context.length, rows)
        for index, layer in enumerate(self.layers):
            # input_layernorm applies to the block only: the context was normalised by hidden_norm.
            context.write(index, *layer.self_attn.keys_values(x, cosine, sine))
        context.length += rows

    def block_hidden(self, context: DraftContext, anchor: int) -> torch.Tensor:
        """The parallel pass: [anchor, mask, …] at positions length … length + γ - 1 to post-norm hidden states.

        The anchor stands at position `context.length`, so the context is exactly the rows before it.

        Returns:
            [γ, hidden_size].
        """
        config = self.config
        ids = torch.full((config.block_size,), config.mask_token_id, device=self.fc.weight.device)
        ids[0] = anchor
        cosine, sine = self._rotary(context.length, config.block_size)
        x = self.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, cosine, sine, context, index)
        return self.norm(x)

    def propose(
        self, context: DraftContext, anchor: int, choose: Callable[[torch.Tensor], int], width: int | None = None
    ) -> Proposal:
        """Draft a block behind the anchor.

        Args:
            context: every committed row before the anchor.
            anchor: the last committed token.
            choose: logits [vocab_size] to a token, called once a slot from left to right.
            width: how many slots to propose, at most γ; the parallel pass always runs over γ, as in training.
        """
        width = self.config.block_size if width is None else width
        hidden = self.block_hidden(context, anchor)[:width]
        base_logits = vocabulary_logits(hidden, self.lm_head.weight)
        logits = torch.empty_like(base_logits)
        previous, state, tokens = anchor, None, []
        for slot in range(width):
            bias, state = self.markov_head.step(previous, hidden[slot], state)
            torch.add(base_logits[slot], bias, out=logits[slot])
            previous = choose(logits[slot])
            tokens.append(previous)
        confidence = None
        if self.confidence_head is not None:
            features = hidden
            if self.config.confidence_head_with_markov:
                before = torch.tensor([anchor, *tokens[:-1]], device=hidden.device)
                features = torch.cat((hidden, self.markov_head.markov_w1(before)), dim=-1)
            confidence = self.confidence_head(features)
        return Proposal(tokens, hidden, base_logits, logits, confidence)

    def _rotary(self, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of positions start … start + rows - 1, each [rows, head_dim]."""
        dtype = self.fc.weight.dtype
        wide = at_least_float32(dtype)
        positions = torch.arange(start, start + rows, device=self.inverse_frequencies.device, dtype=wide)
        angles = torch.outer(positions, self.inverse_frequencies.to(wide)).repeat(1, 2)
        return (angles.cos() * self.rotary_scale).to(dtype), (angles.sin() * self.rotary_scale).to(dtype)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model.safetensors, or of the files that model.safetensors.index.json names (large drafts)."""
    files = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index, "the index of the draft's weights").get("weight_map", {})
        files = [folder / name for name in sorted(set(places.values()))]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if not file.is_file():
            raise DSparkError(f"the draft's weights were expected at {file}, and there is no such file")
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise DSparkError(f"{file} is not a whole safetensors file ({error}); export the draft again") from None
    return tensors


def _check_tensors(model: DraftModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Refuse weights whose names or shapes are not exactly the model's."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    where = f"the draft in {folder}"
    if missing:
        raise DSparkError(f"{where} lacks {', '.join(missing)}, which its config asks for; export the draft again")
    if unknown:
        raise DSparkError(f"{where} holds {', '.join(unknown)}, which its config has no place for; correct the config")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise DSparkError(
                f"{where}: {name} has shape {list(tensors[name].shape)} and the config says {list(shape)}; "
                "export the draft again"
            )
