"""What colocated capture computes of a Llama or Qwen3 target as transformers does; the rest is refused.

Megatron-Bridge reads the config fields and tensors that its mapping names. Of others (biases, scales of quantised
weights, sliding windows, most kinds of RoPE scaling) it warns, says nothing, or builds a model that fails: features of
a target that nobody serves.
"""

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json
from megatron_dspark.targets.folder import EMBEDDING, LM_HEAD, TargetConfig, tensor_names

# What Megatron-Core's own implementation has as constants.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Old checkpoints hold what is computed from the config; heads that predict further tokens do not change the target.
_WITHOUT_EFFECT = re.compile(r"(.*\.)?rotary_emb\.inv_freq|mtp\..*")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def check_computable(target: TargetConfig) -> None:
    """Refuse a target whose features Megatron-Core would compute wrongly, or cannot, from its headers alone.

    Raises:
        DSparkError: one sentence: the config's field, or the tensor that is missing or would not be used.
    """
    for problem in _config_problems(target):
        _refuse(target, problem)
    found, expected = _tensors(target), set(_expected_tensors(target))
    missing = sorted(expected - found)
    if missing:
        raise DSparkError(
            f"the target {target.folder} lacks {len(missing)} of its tensors, for example {missing[0]}; download it "
            "again"
        )
    unused = sorted(name for name in found - expected - {LM_HEAD} if not _WITHOUT_EFFECT.fullmatch(name))
    if unused:
        _refuse(target, f"holds {len(unused)} tensors that Megatron-Bridge would not read, for example {unused[0]}")


def _refuse(target: TargetConfig, problem: str) -> NoReturn:
    raise DSparkError(
        f"the target {target.folder} {problem}; its features can be computed by transformers: megatron-dspark "
        "precompute --source hf, then train --features"
    )


def _config_problems(target: TargetConfig) -> Iterator[str]:
    raw, qwen = target.raw, target.architecture.startswith("Qwen3")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        yield f"has quantised weights (quantization_config, {method}), which Megatron-Bridge would read without scales"
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            yield f"has {field} {raw[field]}, and Megatron-Bridge reads no biases of a {target.architecture}"
    if raw.get("hidden_act", "silu") != "silu":
        yield f"has hidden_act {raw['hidden_act']!r}, and only 'silu' has been compared with transformers"
    kinds = set(raw.get("layer_types") or (_layer_types(raw) if qwen else ())) - {"full_attention"}
    if kinds:
        yield f"has layers of {' and '.join(sorted(kinds))}, and Megatron-Core would attend in full"
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        yield f"has partial_rotary_factor {share}, and Megatron-Core would rotate whole heads"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in (("default",) if qwen else ("default", "linear", "llama3")):
        yield f"has RoPE scaling of type {kind!r}, which colocated capture does not support for a {target.architecture}"
    elif kind == "llama3":
        for field, value in _LLAMA3_SCALING.items():
            if rope.get(field) != value:
                yield f"has {field} {rope.get(field)} in its RoPE scaling, and Megatron-Core has {value:g} always"


def _layer_types(raw: dict[str, Any]) -> set[str]:
    """Kinds of layers where the config does not list them, as transformers makes them up for Qwen3."""
    slides = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    return {"sliding_attention"} if slides and raw.get("max_window_layers", 28) < raw["num_hidden_layers"] else set()


def _tensors(target: TargetConfig) -> set[str]:
    """Names in the files that transformers opens."""
    index = target.folder / _INDEX
    if index.exists():
        weight_map = read_json(index, "the target's index of weight files")["weight_map"]
        for file in sorted(set(weight_map.values())):
            if not (target.folder / file).is_file():
                raise DSparkError(
                    f"the target {target.folder} has no file {file}, which its {_INDEX} names; download it again"
                )
        return set(weight_map)
    single = target.folder / _SINGLE
    files = [single] if single.exists() else target.folder.glob("*.safetensors")
    return {name for file in files for name in tensor_names(file)}


def _expected_tensors(target: TargetConfig) -> Iterator[str]:
    yield from (EMBEDDING, "model.norm.weight")
    if not target.tie_word_embeddings:
        yield LM_HEAD
    parts = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    if target.architecture.startswith("Qwen3"):
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    for layer in range(target.num_layers):
        yield from (f"model.layers.{layer}.{part}.weight" for part in parts)
