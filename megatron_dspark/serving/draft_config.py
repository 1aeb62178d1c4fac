"""What an exported draft's config.json must say (DeepSpec layout), read and checked."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
_ROPE_TYPES = ("default", "llama3")
_POSITIVE_INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "block_size",
    "num_target_layers",
    "markov_rank",
)
# Keys that would change the computation; an export never carries them with another value.
_MUST_NOT_CHANGE = {
    "partial_rotary_factor": (None, 1, 1.0),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "attn_output_gate": (None, False),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "tie_word_embeddings": (None, False),
    "sample_from_anchor": (None, True),
}


@dataclass(frozen=True)
class DraftConfig:
    """The draft's shape and conventions.

    Attributes:
        num_hidden_layers: depth of the draft; `num_target_layers` is the target's.
        block_size: γ, proposals a block.
        target_layer_ids: taps; id i is the output of target decoder layer i, -1 the embedding.
        rope_parameters: as transformers' configuration objects hold them: rope_type, rope_theta and, for a scaled
            type, its own keys.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    attention_bias: bool
    rope_parameters: dict[str, Any] = field(hash=False)
    max_position_embeddings: int | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "DraftConfig":
        """Read `folder`/config.json.

        Raises:
            DSparkError: the file is missing, lacks a key, or asks for something the verifier does not compute.
        """
        path = Path(folder) / "config.json"
        config = read_json(path, "the draft's config")
        if not isinstance(config, dict):
            raise DSparkError(f"the draft's config at {path} is {type(config).__name__}, not a JSON object")
        return cls.parse(config, str(path))

    @classmethod
    def parse(cls, config: dict[str, Any], where: str) -> "DraftConfig":
        """Check a config's keys. `where` names it in error messages. Raises DSparkError."""
        _check_kind(config, where)
        values: dict[str, Any] = {key: _integer(config, key, where) for key in _POSITIVE_INTEGERS}
        values["mask_token_id"] = _integer(config, "mask_token_id", where, least=0)
        epsilon = _required(config, "rms_norm_eps", where)
        if not isinstance(epsilon, float | int) or not 0 < epsilon < 1:
            raise DSparkError(f"{where}: rms_norm_eps is {epsilon!r}; it must be a small positive number")
        values["rms_norm_eps"] = float(epsilon)
        for key in ("enable_confidence_head", "confidence_head_with_markov"):
            values[key] = _boolean(_required(config, key, where), key, where)
        # Its absence cannot hide anything: the bias tensors would be unknown names to the loader.
        values["attention_bias"] = _boolean(config.get("attention_bias", False), "attention_bias", where)
        values["markov_head_type"] = _required(config, "markov_head_type", where)
        values["target_layer_ids"] = _taps(config, values["num_target_layers"], where)
        values["rope_parameters"] = _rope_parameters(config, where)
        values["max_position_embeddings"] = config.get("max_position_embeddings")
        result = cls(**values)
        result._check_consistency(where)
        return result

    def _check_consistency(self, where: str) -> None:
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise DSparkError(
                f"{where}: markov_head_type is {self.markov_head_type!r}; the verifier knows "
                f"{', '.join(MARKOV_HEAD_TYPES)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise DSparkError(
                f"{where}: num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; correct the config"
            )
        if self.head_dim % 2:
            raise DSparkError(f"{where}: head_dim is {self.head_dim}; rotary embedding needs an even number")
        if self.mask_token_id >= self.vocab_size:
            raise DSparkError(
                f"{where}: mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )


def _required(config: dict[str, Any], key: str, where: str) -> Any:
    if key not in config:
        raise DSparkError(f"{where} lacks {key!r}, which the draft cannot be run without; export the draft again")
    return config[key]


def _integer(config: dict[str, Any], key: str, where: str, least: int = 1) -> int:
    value = _required(config, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DSparkError(f"{where}: {key} is {value!r}; it must be an integer of at least {least}")
    return value


def _boolean(value: Any, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise DSparkError(f"{where}: {key} is {value!r}; it must be true or false")
    return value


def _check_kind(config: dict[str, Any], where: str) -> None:
    """Refuse another architecture and settings that would change what the draft computes."""
    architectures = _required(config, "architectures", where)
    if architectures != ["Qwen3DSparkModel"]:
        raise DSparkError(
            f"{where}: architectures is {architectures!r}; the verifier loads ['Qwen3DSparkModel'], the DeepSpec "
            "layout, to which megatron-dspark import converts others"
        )
    activation = _required(config, "hidden_act", where)
    if activation != "silu":
        raise DSparkError(f"{where}: hidden_act is {activation!r}; the verifier computes 'silu'")
    for key, allowed in _MUST_NOT_CHANGE.items():
        if config.get(key) not in allowed:
            raise DSparkError(f"{where}: {key} is {config[key]!r}; the verifier only computes {allowed[-1]!r}")
    layer_types = config.get("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise DSparkError(f"{where}: layer_types is {layer_types!r}; the verifier only computes 'full_attention'")


def _taps(config: dict[str, Any], target_layers: int, where: str) -> tuple[int, ...]:
    taps = _required(config, "target_layer_ids", where)
    if not isinstance(taps, list) or not taps or not all(isinstance(tap, int) for tap in taps):
        raise DSparkError(f"{where}: target_layer_ids is {taps!r}; it must be a list of layer numbers")
    if sorted(set(taps)) != taps or taps[0] < -1 or taps[-1] >= target_layers:
        raise DSparkError(
            f"{where}: target_layer_ids {taps} must strictly increase and lie between -1 (the embedding) and "
            f"{target_layers - 1} (the last of num_target_layers {target_layers})"
        )
    return tuple(taps)


def _rope_parameters(config: dict[str, Any], where: str) -> dict[str, Any]:
    """rope_type, rope_theta and the scaling's keys, from either place a config keeps them."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = {"rope_type": nested.get("rope_type", nested.get("type", "default")), **nested}
    thetas = [place["rope_theta"] for place in (config, nested) if place.get("rope_theta") is not None]
    if not thetas:
        raise DSparkError(f"{where} lacks 'rope_theta', which the draft cannot be run without; export the draft again")
    if len(set(thetas)) > 1:
        raise DSparkError(
            f"{where}: rope_theta is {thetas[0]} at top level and {thetas[1]} in rope_parameters; they must be equal"
        )
    if parameters["rope_type"] not in _ROPE_TYPES:
        raise DSparkError(
            f"{where}: rope_type is {parameters['rope_type']!r}; the verifier computes {', '.join(_ROPE_TYPES)}"
        )
    if parameters["rope_type"] != "default" and config.get("max_position_embeddings") is None:
        raise DSparkError(
            f"{where} lacks 'max_position_embeddings', which rope_type {parameters['rope_type']} needs; "
            "export the draft again"
        )
    return {**parameters, "rope_theta": float(thetas[0])}
