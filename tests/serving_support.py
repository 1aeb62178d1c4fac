"""Tiny targets and drafts for the serving tests, written to disk the way users' files are."""

import json
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from megatron_dspark.serving.draft import DraftModel
from megatron_dspark.serving.draft_config import DraftConfig

VOCABULARY = 96


def scripted(tokens: list[int]) -> Callable[[torch.Tensor], int]:
    """A `choose` that returns the given tokens whatever the logits say."""
    remaining = iter(tokens)
    return lambda _: next(remaining)


def draft_config(**changes: Any) -> dict[str, Any]:
    """A complete config.json of a small draft; `changes` replace keys, a value of ... removes one."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "max_position_embeddings": 256,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": 4,
        "mask_token_id": VOCABULARY - 1,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "layer_types": ["full_attention", "full_attention"],
        "num_anchors": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def draft_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights for a draft config, norms around one."""
    with torch.device("meta"):
        model = DraftModel(DraftConfig.parse(config, "test config"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.3 * noise
    return tensors


def save_draft(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a draft folder; random weights unless tensors are given."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(draft_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def golden_draft(golden: dict[str, torch.Tensor], folder: Path, *, head: str, prefix: str = "w/") -> DraftModel:
    """The golden files' draft, through the real loader, in FP64."""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in golden.items() if name.startswith(prefix)}
    config = draft_config(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        block_size=5,
        mask_token_id=127,
        target_layer_ids=[0, 1, 2],
        num_target_layers=4,
        markov_rank=tensors["markov_head.markov_w1.weight"].shape[1],
        markov_head_type=head,
    )
    return DraftModel.load(save_draft(folder / "draft", config, tensors), torch.float64, torch.device("cpu"))


def target_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny Llama or Qwen3 target that `draft_config` fits."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**(settings | changes))


def tiny_model(kind: str, *, seed: int = 0, context: float = 1.0, **changes: Any) -> PreTrainedModel:
    """A random target.

    Args:
        context: scales what the layers add to the residual stream; at 0 the next token depends on the current token
            alone, and small values leave a little that only the context knows.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(target_config(kind, **changes), attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(context)
    return model


def save_agreeing_draft(model: PreTrainedModel, folder: Path, *, noise: float = 0.0, **changes: Any) -> Path:
    """Write a draft whose Markov head alone computes what the target computes from the current token.

    With a target of `context=0` it agrees with the target always; `noise` or a target's context make it err.
    """
    width = model.config.hidden_size
    config = draft_config(markov_rank=width, vocab_size=model.config.vocab_size, **changes)
    tensors = draft_tensors(config)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    with torch.no_grad():
        tensors["markov_head.markov_w1.weight"] = model.model.norm(model.model.embed_tokens.weight).contiguous().clone()
        tensors["markov_head.markov_w2.weight"] = model.lm_head.weight.detach().clone()
    tensors["markov_head.markov_w2.weight"] += noise * torch.randn(
        tensors["markov_head.markov_w2.weight"].shape, generator=torch.Generator().manual_seed(5)
    )
    return save_draft(folder, config, tensors)


def agreeing_draft(model: PreTrainedModel, folder: Path, **changes: Any) -> DraftModel:
    """`save_agreeing_draft`, loaded in the model's dtype."""
    return DraftModel.load(save_agreeing_draft(model, folder, **changes), model.dtype, torch.device("cpu"))


def double_precision(model: PreTrainedModel) -> PreTrainedModel:
    """`model` in FP64 throughout: transformers computes norms and rotary angles in FP32 whatever the dtype."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[..., None].double() * self.inv_freq.double()).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(norm, module)
        elif hasattr(module, "inv_freq"):
            module.forward = MethodType(rotary, module)
    return model.double()


class ListedUniforms:
    """A recorded stream of random numbers."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.used = values, 0

    def take(self, count: int) -> list[float]:
        taken = self.values[self.used : self.used + count]
        assert len(taken) == count, "the recorded stream is exhausted"
        self.used += count
        return taken


def save_target(folder: Path, model: PreTrainedModel) -> Path:
    """Write a target folder: weights, config, and a tokenizer of one token a word with a chat template."""
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", unk_token="w3")
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no systems') }}{% endif %}"
        "{% for message in messages %}w4 {{ message['content'] }} w5 {% endfor %}"
        "{% if add_generation_prompt %}w6{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder
