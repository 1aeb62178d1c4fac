"""What the config.json of a draft must say, one rule a function: the same rules for writing, reading and linting."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.layouts import DTYPES, DraftDimensions
from megatron_dspark.hf.local_paths import local_paths

ARCHITECTURE = "Qwen3DSparkModel"
MODEL_TYPE = "qwen3"

# Fields that change what an engine builds and that a draft of this layout never has.
TARGET_ONLY_FIELDS = (
    "partial_rotary_factor",
    "sliding_window",
    "attn_output_gate",
    "mrope_section",
    "mrope_interleaved",
    "quantization_config",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "output_router_logits",
    "mlp_only_layers",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "routed_scaling_factor",
    "text_config",
    "vision_config",
    "auto_map",
    "_name_or_path",
)
# Of these, the ones under which the weights would mean something else: such a draft is not read at all.
_CHANGES_MEANING = ("partial_rotary_factor", "attn_output_gate", "quantization_config")

REQUIRED_KEYS = (
    "architectures",
    "model_type",
    *(field.name for field in fields(DraftDimensions) if field.name != "num_taps"),
    "num_target_layers",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_anchors",
    "tie_word_embeddings",
    "layer_types",
    "rms_norm_eps",
    "sample_from_anchor",
    "rope_theta",
    "rope_parameters",
)
# Without these the tensors can still be read, and mean the same: releases of other tools lack them.
_MAY_BE_MISSING_WHEN_READ = ("num_anchors", "sample_from_anchor", "layer_types", "tie_word_embeddings")


@dataclass(frozen=True)
class Problem:
    """One broken rule of a draft's folder.

    Attributes:
        rule: a short, stable name of the rule.
        sentence: what is wrong, both values, what to do.
        readable: the draft's weights still have one meaning, so importing it is safe although exporting it is not.
    """

    rule: str
    sentence: str
    readable: bool = False


def config_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Every rule of the layout that `config` breaks; empty for a config that export may write."""
    return [problem for rule in _RULES for problem in rule(config)]


def rope_base(config: Mapping[str, Any]) -> float | None:
    """The rotary base, from the top level or from `rope_parameters`; None when neither says it."""
    nested = _inner(config, "rope_parameters") or _inner(config, "rope_scaling")
    return config.get("rope_theta", nested.get("rope_theta"))


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _is_positive_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _presence(config: Mapping[str, Any]) -> Iterator[Problem]:
    nested_places = [key for key in ("dflash_config", "transformer_layer_config", "text_config") if key in config]
    for key in REQUIRED_KEYS:
        if key in config:
            continue
        place = next((place for place in nested_places if key in _inner(config, place)), None)
        found = f"it stands inside {place!r}; move it to the top level" if place else "add it"
        readable = key in _MAY_BE_MISSING_WHEN_READ
        if key in ("rope_theta", "rope_parameters"):
            if rope_base(config) is None:
                continue
            readable = True
            found = "write it there and in rope_parameters" if key == "rope_theta" else "write rope_theta there too"
        yield Problem(
            "top-level-keys", f"config.json has no {key!r} at top level, where engines look; {found}", readable
        )


def _identity(config: Mapping[str, Any]) -> Iterator[Problem]:
    fixed = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    for key, wanted in fixed.items():
        if key in config and config[key] != wanted:
            yield Problem(
                key.replace("_", "-"), f"config.json says {key} = {config[key]!r}, and engines need {wanted!r}; set it"
            )
    if config.get("sample_from_anchor", True) is not True:
        yield Problem(
            "sample-from-anchor",
            f"config.json says sample_from_anchor = {config['sample_from_anchor']!r}, but slot 0 of this layout "
            "predicts the token after the anchor; convert the draft or set it to true",
        )
    for key in ("dtype", "torch_dtype"):
        if key in config and config[key] not in list(DTYPES):
            yield Problem("dtype", f"config.json says {key} = {config[key]!r}; choose {' or '.join(DTYPES)}")


def _sizes(config: Mapping[str, Any]) -> Iterator[Problem]:
    if config.get("markov_rank") == 0:
        yield Problem(
            "markov-rank",
            "config.json says markov_rank = 0, and engines refuse a draft without a sequential head; train one with "
            "a rank above 0",
        )
        return
    known = {key: value for key, value in config.items() if key != "target_layer_ids"}
    try:
        # The taps have rules of their own, with sentences of their own.
        dimensions = DraftDimensions.from_config({**known, "target_layer_ids": [0]})
    except DSparkError as error:
        missing = [field.name for field in fields(DraftDimensions) if field.name not in config]
        if set(missing) <= {"num_taps"}:
            yield Problem("sizes", str(error))
        return
    if dimensions.num_attention_heads % dimensions.num_key_value_heads:
        yield Problem(
            "heads",
            f"config.json says {dimensions.num_attention_heads} attention heads for {dimensions.num_key_value_heads} "
            "key-value heads; the first must be a multiple of the second",
        )
    if "rms_norm_eps" in config and not _is_positive_number(config["rms_norm_eps"]):
        yield Problem(
            "sizes", f"config.json says rms_norm_eps = {config['rms_norm_eps']!r}; a positive number is needed"
        )
    if dimensions.head_dim % 2:
        yield Problem("heads", f"config.json says head_dim = {dimensions.head_dim}; rotary embedding needs an even one")


def _block(config: Mapping[str, Any]) -> Iterator[Problem]:
    for key in ("block_size", "num_target_layers", "num_anchors"):
        if key in config and (type(config[key]) is not int or config[key] < 1):
            yield Problem(
                key.replace("_", "-"), f"config.json says {key} = {config[key]!r}; a positive integer is needed"
            )
    mask, vocabulary = config.get("mask_token_id"), config.get("vocab_size")
    if "mask_token_id" in config and type(vocabulary) is int and (type(mask) is not int or not 0 <= mask < vocabulary):
        yield Problem(
            "mask-token-id",
            f"config.json says mask_token_id = {mask!r}, outside the vocabulary of {vocabulary}; use an id in it that "
            "text never contains",
        )
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if "layer_types" in config and type(layers) is int and kinds != ["full_attention"] * layers:
        yield Problem(
            "layer-types",
            f"config.json says layer_types = {kinds!r}; a draft of {layers} layers has 'full_attention' {layers} times",
        )


def _taps(config: Mapping[str, Any]) -> Iterator[Problem]:
    taps, layers = config.get("target_layer_ids"), config.get("num_target_layers")
    if "target_layer_ids" not in config:
        return
    if not isinstance(taps, list | tuple) or not taps or any(type(tap) is not int for tap in taps):
        yield Problem("taps", f"config.json says target_layer_ids = {taps!r}; a list of target layer numbers is needed")
        return
    if any(later <= earlier for earlier, later in itertools.pairwise(taps)):
        yield Problem("taps", f"config.json says target_layer_ids = {list(taps)}; they must increase strictly")
    if type(layers) is not int:
        return
    for tap in taps:
        if tap == -1 or tap == layers - 1:
            what = "the embedding output" if tap == -1 else f"the last of {layers} layers"
            yield Problem(
                "taps",
                f"tap {tap} is {what} of the target, which no engine can capture; train with taps inside "
                f"[0, {layers - 2}]",
            )
        elif not 0 <= tap < layers:
            yield Problem(
                "taps",
                f"tap {tap} is not a layer of a target of {layers} layers; train with taps inside [0, {layers - 2}]",
            )


def _rotary(config: Mapping[str, Any]) -> Iterator[Problem]:
    top, nested = config.get("rope_theta"), _inner(config, "rope_parameters").get("rope_theta")
    base = rope_base(config)
    if not _is_positive_number(base):
        yield Problem(
            "rope-theta",
            f"config.json says rope_theta = {base!r}, where a positive number is needed; write the rotary base that "
            "the draft was trained with, at top level and in rope_parameters",
        )
        return
    if top is not None and "rope_parameters" in config and nested != top:
        yield Problem(
            "rope-theta",
            f"config.json says rope_theta = {top!r} at top level and {nested!r} in rope_parameters; engines read one "
            "or the other, so write the same number in both",
            readable=nested is None,
        )
    for place in ("rope_parameters", "rope_scaling"):
        values = _inner(config, place)
        kind = values.get("rope_type", values.get("type", "default"))
        if kind != "default":
            yield Problem(
                "rope-scaling",
                f"config.json says {kind!r} rope scaling in {place}, which this draft was not trained with and whose "
                "reading differs between engines; only 'default' is supported",
            )


def _target_only(config: Mapping[str, Any]) -> Iterator[Problem]:
    rotary = {**_inner(config, "rope_scaling"), **_inner(config, "rope_parameters")}
    for key in TARGET_ONLY_FIELDS:
        value = config.get(key, rotary.get(key))
        harmless = not value or (key == "partial_rotary_factor" and value == 1)
        if not harmless:
            yield Problem(
                "target-only-fields",
                f"config.json carries {key} = {value!r}, a field of the target that changes what an engine builds for "
                "the draft; remove it",
                readable=key not in _CHANGES_MEANING,
            )


def causal_blocks(config: Mapping[str, Any]) -> list[str]:
    """Return the places where a config says that a slot sees only earlier slots of its block."""
    blocks = {"": config, **{f"{place}.": _inner(config, place) for place in ("dflash_config", "dspark_config")}}
    return [f"{place}{key}" for place, block in blocks.items() for key in ("causal", "is_causal") if block.get(key)]


def _second_opinions(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What a nested block or another tool's key says, where engines may read it instead of the key at top level."""
    for place in ("dflash_config", "dspark_config"):
        nested = _inner(config, place)
        for key in ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "markov_head_type"):
            if key in nested and key in config and nested[key] != config[key]:
                yield Problem(
                    "nested-keys",
                    f"config.json says {key} = {config[key]!r} at top level and {nested[key]!r} in {place}; engines "
                    "read one or the other, so write the same in both or remove the second",
                )
        method = nested.get("projector_type", "dspark")
        if method != "dspark":
            yield Problem(
                "method",
                f"config.json says {place}.projector_type = {method!r}, by which engines choose another drafting "
                "method and leave the heads out; write 'dspark' or remove it",
            )
    for key in ("method", "algorithm", "speculators_model_type"):
        if config.get(key, "dspark") != "dspark":
            yield Problem(
                "method",
                f"config.json says {key} = {config[key]!r}, another drafting method; write 'dspark' or remove it",
            )
    if places := causal_blocks(config):
        yield Problem(
            "block-visibility",
            f"config.json says {places[0]} = True, that a slot sees only earlier slots of its block, and this draft's "
            "slots see the whole block; remove it, or set it to false",
        )
    shifted, taps = config.get("aux_hidden_state_layer_ids"), config.get("target_layer_ids")
    if isinstance(shifted, list) and isinstance(taps, list) and shifted != [tap + 1 for tap in taps]:
        yield Problem(
            "tap-shift",
            f"config.json says aux_hidden_state_layer_ids = {shifted} beside target_layer_ids = {taps}; the first "
            f"counts from 1 and has to be {[tap + 1 for tap in taps]}, or an engine reads other layers; remove it",
        )
    reduced, whole = config.get("draft_vocab_size"), config.get("vocab_size")
    if reduced is not None and reduced != whole:
        yield Problem(
            "draft-vocabulary",
            f"config.json says draft_vocab_size = {reduced!r} and vocab_size = {whole!r}, for which engines look for "
            "d2t; a draft of this layout proposes from the whole vocabulary, so remove draft_vocab_size",
        )


def _local_paths(config: Mapping[str, Any]) -> Iterator[Problem]:
    for place, path in local_paths(config):
        yield Problem(
            "local-paths",
            f"config.json names the local path {path!r} at {place}, which exists on one machine only; remove it",
            readable=True,
        )


_RULES: tuple[Callable[[Mapping[str, Any]], Iterator[Problem]], ...] = (
    _presence,
    _identity,
    _sizes,
    _block,
    _taps,
    _rotary,
    _target_only,
    _second_opinions,
    _local_paths,
)
