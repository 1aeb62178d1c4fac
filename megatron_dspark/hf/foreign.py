"""Drafts of other tools, told by their content and described in the terms of the DeepSpec layout.

Four layouts are known. DeepSpec and NeMo AutoModel have every key at top level. SpecForge nests taps and mask token in
`dflash_config` and stores no embedding or LM head. ModelOpt nests everything of DSpark there, and its heads have flat
names. speculators nests the backbone in `transformer_layer_config` and counts taps from 1. (Read from SpecForge's
`modeling/draft/dspark.py` and `core/dspark.py`, ModelOpt's `export/plugins/hf_spec_export.py`, and speculators'
`models/dspark/config.py` and `models/dflash/core.py`.)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.config import draft_hf_config, settings_from_config
from megatron_dspark.hf.rules import ARCHITECTURE, MODEL_TYPE, causal_blocks, rope_base

LAYOUTS = ("deepspec", "specforge", "modelopt", "speculators")
TITLES = {
    "deepspec": "the DeepSpec layout",
    "specforge": "the SpecForge layout",
    "modelopt": "the ModelOpt layout",
    "speculators": "the speculators layout",
    "deepseek-v4": "DeepSeek-V4's bundled layout",
}
REPLICAS = ("embed_tokens.weight", "lm_head.weight")

_NESTS = ("dflash_config", "dspark_config")
# Flat names, in ModelOpt's files, of what is under markov_head. and confidence_head.proj. here.
_FLAT_NAMES = (
    (re.compile(r"^(markov_w[12]|gate_proj|joint_proj)\."), r"markov_head.\1."),
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),
)
# Frozen parts of the target that older speculators files carry; the draft's own computation never reads them.
_TARGET_COPIES = re.compile(r"^verifier_")
# Settings of a nested block that change the computation, with the only value that this library's draft has.
_NESTED_MUST_BE = {
    "causal": (False, "a block that sees itself in both directions"),
    "use_swa": (False, "attention without a sliding window"),
    "attention_sink_bias": (False, "attention without a sink"),
}


@dataclass(frozen=True)
class Conversion:
    """A draft of any layout, in the terms of the DeepSpec layout.

    Attributes:
        layout: one of `LAYOUTS`.
        config: its config.json as the DeepSpec layout says it.
        names: name in the DeepSpec layout to name in the folder, of every tensor that is used.
        dropped: tensors of the folder that no draft reads.
    """

    layout: str
    config: dict[str, Any]
    names: dict[str, str]
    dropped: tuple[str, ...]


def recognise(config: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    """Tell a layout by what is in the files.

    Args:
        config: the folder's config.json.
        names: the folder's tensors, by name.

    Returns:
        One of `LAYOUTS`, or "deepseek-v4".

    Raises:
        DSparkError: the folder does not hold a DSpark draft.
    """
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return "speculators"
    if "dspark_block_size" in config:
        return "deepseek-v4"
    nested = _nested(config)
    if not any("target_layer_ids" in place for place in (config, nested)):
        named = (config.get("architectures") or ["model"])[0]
        raise DSparkError(
            f"the folder holds a {named} whose config.json names no target_layer_ids, so it is no DSpark draft; give "
            "the folder of one"
        )
    if any(pattern.match(name) for name in names for pattern, _ in _FLAT_NAMES):
        return "modelopt"
    return "deepspec" if "target_layer_ids" in config else "specforge"


def convert(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    target_config: Mapping[str, Any] | None = None,
) -> Conversion:
    """Describe a draft of any known layout in the terms of the DeepSpec layout.

    Args:
        config: the folder's config.json.
        shapes: shape of each of its tensors, by name.
        dtype: "bfloat16" or "float32", for the described config.
        target_config: the target's config.json: it fills in what a layout leaves to the target (its depth).

    Raises:
        DSparkError: the draft is of another kind, something is missing, or a setting has no counterpart.
    """
    layout = recognise(config, shapes)
    if layout == "deepseek-v4":
        raise DSparkError(f"the folder holds a draft in {TITLES[layout]}, which belongs inside its target's own files")
    names = {_our_name(name): name for name in shapes if not _is_left_out(name)}
    own = {"speculators": _speculators, "modelopt": _modelopt}.get(layout, _plain)(config)
    if layout != "deepspec":
        # These layouts take embedding and LM head from the target, tied or not: the flag is the target's.
        own["tie_word_embeddings"] = False
    _refuse_reduced_vocabulary(own, shapes)
    _add_from_target(own, target_config)
    if rope_base(own) is None:
        raise DSparkError(
            f"the draft's config ({TITLES[layout]}) does not say rope_theta, the rotary base that it was trained with; "
            "write it there"
        )
    own = {**_from_tensors({ours: shapes[theirs] for ours, theirs in names.items()}), **own}
    own.pop("torch_dtype", None)
    own.update(architectures=[ARCHITECTURE], model_type=MODEL_TYPE, dtype=dtype)
    settings = settings_from_config({**_backbone_defaults(own), **own})
    described = target_config or {
        "hidden_size": settings.hidden_size,
        "vocab_size": settings.vocab_size,
        "num_hidden_layers": settings.num_target_layers,
        **{key: own[key] for key in ("initializer_range", "pad_token_id") if key in own},
    }
    return Conversion(
        layout,
        draft_hf_config(described, settings),
        names,
        tuple(sorted(name for name in shapes if _is_left_out(name))),
    )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpec's keys at top level; SpecForge's with the nested ones lifted."""
    nested = _nested(config)
    for key in ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "markov_head_type"):
        if key in config and key in nested and config[key] != nested[key]:
            raise DSparkError(
                f"the draft's config says {key} = {config[key]!r} at top level and {nested[key]!r} in a nested block, "
                "and readers take one or the other; correct one of them"
            )
    own = {key: value for key, value in {**nested, **config}.items() if key not in _NESTS}
    if places := causal_blocks(config):
        raise DSparkError(
            f"the draft's config says {places[0]} = True: a block that sees only earlier slots; not supported"
        )
    return own


def _modelopt(config: Mapping[str, Any]) -> dict[str, Any]:
    own, nested = _plain(config), _nested(config)
    if own.get("projector_type", "dspark") != "dspark":
        raise DSparkError(
            f"the draft's config says projector_type = {own['projector_type']!r}, another drafting method; give a "
            "DSpark draft"
        )
    if nested.get("shift_label", own.get("sample_from_anchor")) is not True:
        raise DSparkError(
            f"the draft's config says shift_label = {nested.get('shift_label')!r}: slot 0 has to predict the token "
            "after the anchor (shift_label true), or every proposal is one token off"
        )
    if "use_confidence_head" in own:
        own["enable_confidence_head"] = bool(own["use_confidence_head"])
    return own


def _speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("speculators_model_type")
    if kind != "dspark":
        raise DSparkError(f"the draft's config says speculators_model_type = {kind!r}; only 'dspark' drafts are read")
    backbone = config.get("transformer_layer_config")
    if not isinstance(backbone, Mapping):
        raise DSparkError(
            "the draft's config (speculators layout) has no transformer_layer_config; its sizes are unknown"
        )
    required = ("aux_hidden_state_layer_ids", "mask_token_id", "block_size", "markov_rank", "sample_from_anchor")
    for key in required:
        if config.get(key) is None:
            why = "; vLLM takes false where it is absent and speculators true" if key == "sample_from_anchor" else ""
            raise DSparkError(f"the draft's config (speculators layout) does not say {key}{why}; write it there")
    own = {key: value for key, value in config.items() if key not in _SPECULATORS_ONLY}
    own = {**_explicit_backbone(backbone), **own}
    own["target_layer_ids"] = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    wide = config.get("target_hidden_size")
    if wide is not None and wide != own.get("hidden_size"):
        raise DSparkError(
            f"the draft's config says target_hidden_size = {wide} and its own hidden_size is {own.get('hidden_size')}; "
            "only drafts as wide as their target are supported"
        )
    return own


_SPECULATORS_ONLY = (
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "target_hidden_size",
    "has_no_defaults_at_init",
)


def _explicit_backbone(backbone: Mapping[str, Any]) -> dict[str, Any]:
    """speculators stores only what differs from the defaults of the backbone's own config class."""
    own = {key: value for key, value in backbone.items() if key not in ("architectures", "model_type")}
    return {**_backbone_defaults({**own, "model_type": backbone.get("model_type", MODEL_TYPE)}), **own}


def _backbone_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' config class of the backbone adds to `config`, without inventing a rotary base."""
    # Importing transformers' configs takes a second, which linting a DeepSpec folder does not need.
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type", MODEL_TYPE)
    kind = MODEL_TYPE if kind in ("dspark", "dflash") else kind
    if kind not in CONFIG_MAPPING:
        raise DSparkError(f"the draft's config says model_type = {kind!r}, which transformers does not know")
    keys = (
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "attention_bias",
        "hidden_act",
        "max_position_embeddings",
    )
    given = {key: config[key] for key in keys if config.get(key) is not None}
    described = CONFIG_MAPPING[kind](**given).to_dict()
    return {key: described[key] for key in keys if described.get(key) is not None}


def _from_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What the tensors themselves say of the heads: tools leave out of their configs what is their default."""
    head = "markov_head."
    says: dict[str, Any] = {
        "markov_head_type": "gated"
        if f"{head}gate_proj.weight" in shapes
        else "rnn"
        if f"{head}joint_proj.weight" in shapes
        else "vanilla",
        "enable_confidence_head": "confidence_head.proj.weight" in shapes,
        "confidence_head_with_markov": True,
    }
    if f"{head}markov_w1.weight" in shapes:
        says["markov_rank"] = shapes[f"{head}markov_w1.weight"][-1]
    if "confidence_head.proj.weight" in shapes and "hidden_norm.weight" in shapes:
        says["confidence_head_with_markov"] = (
            shapes["confidence_head.proj.weight"][-1] != shapes["hidden_norm.weight"][-1]
        )
    return says


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in _NESTS:
        place = config.get(key)
        if not isinstance(place, Mapping):
            continue
        for name, value in place.items():
            wanted = _NESTED_MUST_BE.get(name)
            if wanted and value not in (None, wanted[0]):
                raise DSparkError(
                    f"the draft's config says {key}.{name} = {value!r}, and only {wanted[1]} is supported; it cannot "
                    "be converted"
                )
            merged[name] = value
    return merged


def _our_name(name: str) -> str:
    for pattern, replacement in _FLAT_NAMES:
        name = pattern.sub(replacement, name)
    return name


def _is_left_out(name: str) -> bool:
    return bool(_TARGET_COPIES.match(name)) or name in ("d2t", "t2d")


def _refuse_reduced_vocabulary(own: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    whole, reduced = own.get("vocab_size"), own.pop("draft_vocab_size", None)
    if reduced is None and "d2t" in shapes:
        reduced = shapes["d2t"][0]
    if reduced is not None and whole is not None and reduced != whole:
        raise DSparkError(
            f"the draft proposes from {reduced} of the target's {whole} tokens (d2t, t2d), and only drafts over the "
            "whole vocabulary are supported; train one with draft_vocab_size equal to vocab_size"
        )
    if "d2t" in shapes:
        raise DSparkError(
            "the folder holds d2t, a renumbering of tokens, although the draft's vocabulary is the target's whole one; "
            "remove d2t and t2d if they renumber nothing"
        )


def _add_from_target(own: dict[str, Any], target_config: Mapping[str, Any] | None) -> None:
    target = (target_config or {}).get("text_config") or target_config or {}
    depth = target.get("num_hidden_layers")
    if "num_target_layers" not in own:
        if depth is None:
            raise DSparkError(
                "the draft's config does not say how many layers its target has (num_target_layers); name the target's "
                "folder (--target)"
            )
        own["num_target_layers"] = depth
