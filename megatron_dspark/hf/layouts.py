"""The names and shapes of a draft's tensors in a Hugging Face folder, as data.

One layout is described here: the dense one that DeepSpec saves and that the published `dspark_qwen3_*` drafts
have. It has no name prefix, separate q, k, v and gate, up projections, and draft-owned copies of the target's
embedding and LM head. Another layout is another tuple of rules.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from megatron_dspark.errors import DSparkError

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")

# Spelling in config.json and in a safetensors header, with the bytes of one element.
DTYPES: dict[str, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}


@dataclass(frozen=True, kw_only=True)
class DraftDimensions:
    """What decides the tensors of a dense draft: sizes in elements, and which optional parts exist."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_taps: int
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    attention_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DraftDimensions":
        """Read the dimensions from a draft's config.json.

        Raises:
            DSparkError: a key is missing, or is not of the kind it has to be.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            key = "target_layer_ids" if field.name == "num_taps" else field.name
            if key not in config:
                raise DSparkError(
                    f"the draft's config has no top-level key {key!r}, without which its tensors are unknown; add it"
                )
            value = config[key]
            if key == "target_layer_ids":
                value = len(value) if isinstance(value, list | tuple) else 0
            # bool is a kind of int in Python, so the two have to be told apart by hand.
            if type(value) is not field.type or (field.type is int and value < 1):
                wanted = {int: "a positive integer", bool: "true or false", str: "a word"}[field.type]
                wanted = "a list of layer numbers" if key == "target_layer_ids" else wanted
                raise DSparkError(
                    f"the draft's config says {key} = {config[key]!r}, where {wanted} is needed; correct it"
                )
            values[field.name] = value
        if values["markov_head_type"] not in MARKOV_HEAD_TYPES:
            raise DSparkError(
                f"the draft's config says markov_head_type = {values['markov_head_type']!r}; "
                f"choose one of {', '.join(MARKOV_HEAD_TYPES)}"
            )
        return cls(**values)

    @property
    def taps_width(self) -> int:
        return self.num_taps * self.hidden_size

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def gate_input(self) -> int:
        return self.hidden_size + self.markov_rank

    @property
    def joint_input(self) -> int:
        return self.hidden_size + 2 * self.markov_rank

    @property
    def joint_output(self) -> int:
        return 3 * self.markov_rank

    @property
    def confidence_input(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @property
    def one(self) -> int:
        return 1

    @property
    def gated(self) -> bool:
        return self.markov_head_type == "gated"

    @property
    def rnn(self) -> bool:
        return self.markov_head_type == "rnn"


@dataclass(frozen=True)
class TensorRule:
    """One tensor, or one tensor a layer.

    Attributes:
        name: its name; `{n}` stands for the layer number, from 0.
        shape: the `DraftDimensions` attribute of each dimension.
        when: the boolean `DraftDimensions` attribute on which its presence depends; empty: always present.
    """

    name: str
    shape: tuple[str, ...]
    when: str = ""


DEEPSPEC_DENSE: tuple[TensorRule, ...] = (
    TensorRule("embed_tokens.weight", ("vocab_size", "hidden_size")),
    TensorRule("fc.weight", ("hidden_size", "taps_width")),
    TensorRule("hidden_norm.weight", ("hidden_size",)),
    TensorRule("layers.{n}.input_layernorm.weight", ("hidden_size",)),
    TensorRule("layers.{n}.self_attn.q_proj.weight", ("query_width", "hidden_size")),
    TensorRule("layers.{n}.self_attn.k_proj.weight", ("key_value_width", "hidden_size")),
    TensorRule("layers.{n}.self_attn.v_proj.weight", ("key_value_width", "hidden_size")),
    TensorRule("layers.{n}.self_attn.o_proj.weight", ("hidden_size", "query_width")),
    TensorRule("layers.{n}.self_attn.q_proj.bias", ("query_width",), when="attention_bias"),
    TensorRule("layers.{n}.self_attn.k_proj.bias", ("key_value_width",), when="attention_bias"),
    TensorRule("layers.{n}.self_attn.v_proj.bias", ("key_value_width",), when="attention_bias"),
    TensorRule("layers.{n}.self_attn.o_proj.bias", ("hidden_size",), when="attention_bias"),
    TensorRule("layers.{n}.self_attn.q_norm.weight", ("head_dim",)),
    TensorRule("layers.{n}.self_attn.k_norm.weight", ("head_dim",)),
    TensorRule("layers.{n}.post_attention_layernorm.weight", ("hidden_size",)),
    TensorRule("layers.{n}.mlp.gate_proj.weight", ("intermediate_size", "hidden_size")),
    TensorRule("layers.{n}.mlp.up_proj.weight", ("intermediate_size", "hidden_size")),
    TensorRule("layers.{n}.mlp.down_proj.weight", ("hidden_size", "intermediate_size")),
    TensorRule("norm.weight", ("hidden_size",)),
    TensorRule("lm_head.weight", ("vocab_size", "hidden_size")),
    TensorRule("markov_head.markov_w1.weight", ("vocab_size", "markov_rank")),
    TensorRule("markov_head.markov_w2.weight", ("vocab_size", "markov_rank")),
    TensorRule("markov_head.gate_proj.weight", ("markov_rank", "gate_input"), when="gated"),
    TensorRule("markov_head.gate_proj.bias", ("markov_rank",), when="gated"),
    TensorRule("markov_head.joint_proj.weight", ("joint_output", "joint_input"), when="rnn"),
    TensorRule("markov_head.joint_proj.bias", ("joint_output",), when="rnn"),
    TensorRule("confidence_head.proj.weight", ("one", "confidence_input"), when="enable_confidence_head"),
    TensorRule("confidence_head.proj.bias", ("one",), when="enable_confidence_head"),
)

# Names that other tools write and that no reader of this layout understands, with what they mean.
FOREIGN_NAMES: tuple[tuple[str, str], ...] = (
    (r"^model\.", "the 'model.' prefix belongs to whole language models; this layout has no prefix"),
    (
        r"^(markov_w[12]|gate_proj|joint_proj)\.",
        "a flat sequential-head name (ModelOpt); here it is under markov_head.",
    ),
    (r"^confidence_proj\.", "a flat confidence name (ModelOpt); here it is under confidence_head.proj."),
    (r"^(d2t|t2d)$", "a table of a reduced draft vocabulary (speculators); here the vocabulary is the target's"),
    (r"^verifier_", "a tensor of the target, saved with the draft (speculators)"),
    (r"^logit_head\.", "another name of lm_head"),
    (r"rotary_emb", "a rotary table, which readers compute from rope_theta"),
    (r"^mask_embedding", "a separate mask embedding; here the mask is the embedding row of mask_token_id"),
)


def tensor_shapes(
    dimensions: DraftDimensions, rules: Iterable[TensorRule] = DEEPSPEC_DENSE
) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft, in the layout's order: name to shape."""
    by_layer: list[TensorRule] = []
    shapes: dict[str, tuple[int, ...]] = {}

    def write_layers() -> None:
        for layer in range(dimensions.num_hidden_layers):
            for rule in by_layer:
                shapes[rule.name.format(n=layer)] = _shape(rule, dimensions)
        by_layer.clear()

    for rule in rules:
        if rule.when and not getattr(dimensions, rule.when):
            continue
        if "{n}" in rule.name:
            by_layer.append(rule)
            continue
        write_layers()
        shapes[rule.name] = _shape(rule, dimensions)
    write_layers()
    return shapes


def dtype_names(dtype: str) -> tuple[str, int]:
    """The safetensors spelling of `dtype` and its bytes per element. All tensors of a draft have one dtype.

    Raises:
        DSparkError: `dtype` is not one that a draft is stored in.
    """
    if dtype not in DTYPES:
        raise DSparkError(f"dtype {dtype!r} is not one that a draft is stored in; choose {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def safetensors_bytes(shapes: Mapping[str, Sequence[int]], dtype: str, metadata: Mapping[str, str]) -> int:
    """Size in bytes of one safetensors file that holds these tensors: known before a single one is gathered.

    The format is an 8-byte length, a JSON header padded with spaces to a multiple of 8, and the tensors, which
    safetensors' own writer sorts by name when they have one dtype.
    """
    spelling, element = dtype_names(dtype)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in sorted(shapes):
        size = element * prod(shapes[name])
        header[name] = {"dtype": spelling, "shape": list(shapes[name]), "data_offsets": [offset, offset + size]}
        offset += size
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8 + offset


def foreign_name(name: str) -> str | None:
    """What `name` means in another tool's layout, or None where it is not a name of one."""
    return next((meaning for pattern, meaning in FOREIGN_NAMES if re.search(pattern, name)), None)


def _shape(rule: TensorRule, dimensions: DraftDimensions) -> tuple[int, ...]:
    return tuple(getattr(dimensions, dimension) for dimension in rule.shape)
