"""A target's Hugging Face folder: what it is, whether it will do, and its embedding and LM-head rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, require_folder
from megatron_dspark.targets.fingerprint import config_fingerprint, digest_of, weights_fingerprint

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "generation_config.json")
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetConfig:
    """The shape of a dense target, read from its config.json (kept whole in `raw`)."""

    folder: Path
    architecture: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    raw: dict[str, Any]

    weights: str | None = None
    """Fingerprint of the whole target's weights where the folder holds only some of them (in a feature cache)."""

    known_as: str | None = None
    """Name of the target where the folder is called otherwise (in a feature cache)."""

    @property
    def name(self) -> str:
        """What a person calls the target."""
        return self.known_as or self.folder.name

    @property
    def described(self) -> dict[str, Any]:
        """`raw` with the language model's sizes under the names of Llama's config, whatever its own are called."""
        sizes = {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
        }
        inner = self.raw.get("text_config")
        return {**self.raw, "text_config": {**inner, **sizes}} if inner else {**self.raw, **sizes}

    def weights_fingerprint(self) -> str:
        """SHA-256 over every byte of the weights, whatever file or order they stand in."""
        return self.weights or weights_fingerprint(self.folder)

    def fingerprint(self) -> str:
        """SHA-256 over config and weights: equal for targets that compute the same."""
        return digest_of([config_fingerprint(self.raw), self.weights_fingerprint()])


def read_target_config(folder: str | Path, *, any_architecture: bool = False) -> TargetConfig:
    """Read and check a target's folder.

    Args:
        folder: a Hugging Face folder.
        any_architecture: also take any other decoder (its features come from
            transformers); of a model of several parts, the config of the language model counts.

    Raises:
        DSparkError: the folder or its config is missing, its architecture is not a Llama or Qwen3 dense model, or it
            holds no safetensors.
    """
    folder = Path(folder)
    require_folder(folder, "the target folder", "name a Hugging Face folder on this machine")
    raw = read_json(folder / "config.json", "the target's config")
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES and not any_architecture:
        raise DSparkError(
            f"the target at {folder} is a {architecture} and has to be a {' or '.join(SUPPORTED_ARCHITECTURES)} here; "
            "of others, precompute --source hf captures features for train --features, from conversations that "
            "prepare --keep-responses takes"
        )
    if not list(folder.glob("*.safetensors")):
        raise DSparkError(f"the target folder {folder} holds no *.safetensors file; save its weights as safetensors")
    whole = raw
    if architecture not in SUPPORTED_ARCHITECTURES:
        raw = _language_model_config(folder)
    try:
        heads = raw["num_attention_heads"]
        return TargetConfig(
            folder=folder,
            architecture=architecture,
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            intermediate_size=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=_rope_theta(raw),
            max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            raw=whole,
        )
    except KeyError as error:
        raise DSparkError(f"the target's config at {folder / 'config.json'} has no {error.args[0]!r}") from None


def _language_model_config(folder: Path) -> dict[str, Any]:
    """The sizes of any decoder, under the names that Llama's config has for them, as transformers knows them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    # A draft of a target without rotary positions or RMS norms has these itself, with the usual values.
    found: dict[str, Any] = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "intermediate_size": 4 * config.hidden_size}
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    names += ("intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    found.update({name: value for name in names if (value := getattr(config, name, None)) is not None})
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return {**found, **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})}


def _rope_theta(raw: dict[str, Any]) -> float:
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta"))
    # Llama 2's config does not say it, and this is what transformers then takes for Llama and Qwen3.
    return 10000.0 if theta is None else float(theta)


def frozen_table_bytes(config: TargetConfig) -> int:
    """Return the bytes of the target's embedding and LM head as its files hold them; no weight is read."""
    files, total = _files_of_tensors(config.folder), 0
    for name in (EMBEDDING, *([] if config.tie_word_embeddings else [LM_HEAD])):
        if name in files:
            with safe_open(files[name], framework="pt") as tensors:
                # Of no rows, for its type alone.
                total += config.vocab_size * config.hidden_size * tensors.get_slice(name)[:0].element_size()
    return total


def read_frozen_tables(config: TargetConfig) -> dict[str, Tensor]:
    """Return the target's embedding and LM head, [V, d] each; a tied target gives its embedding twice.

    Raises:
        DSparkError: a tensor is missing or has another shape than the config says.
    """
    files = _files_of_tensors(config.folder)
    tables = {}
    for ours, theirs in (("embed_tokens", EMBEDDING), ("lm_head", LM_HEAD)):
        name = EMBEDDING if config.tie_word_embeddings else theirs
        if name not in files:
            raise DSparkError(f"the target at {config.folder} has no tensor {name!r}, which the draft copies")
        with safe_open(files[name], framework="pt") as tensors:
            table = tensors.get_tensor(name)
        expected = (config.vocab_size, config.hidden_size)
        if tuple(table.shape) != expected:
            raise DSparkError(
                f"{name} of the target at {config.folder} has shape {tuple(table.shape)} and its config says {expected}"
            )
        tables[ours] = table
    return tables


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    return {name: file for file in sorted(folder.glob("*.safetensors")) for name in tensor_names(file)}


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file; no weight is read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise DSparkError(f"{file} is not a whole safetensors file ({error}); copy the target again") from None


def copy_rows(destination: Tensor, table: Tensor, rank: int) -> None:
    """Copy this rank's vocabulary rows of `table` [V, d] into `destination` [V_padded/tp, d]; padding rows become 0."""
    start = rank * destination.shape[0]
    rows = table[start : start + destination.shape[0]]
    with torch.no_grad():
        destination.zero_()
        destination[: rows.shape[0]].copy_(rows)
