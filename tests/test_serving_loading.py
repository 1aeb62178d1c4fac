"""What the loaders refuse: each with one sentence that names the file or key and says what to do."""

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import megatron_dspark.serving
from megatron_dspark.errors import DSparkError
from megatron_dspark.serving.draft import DraftModel
from megatron_dspark.serving.draft_config import DraftConfig
from megatron_dspark.serving.target import Target, load_tokenizer
from tests.serving_support import draft_config, draft_tensors, save_draft, save_target, tiny_model

CPU = torch.device("cpu")


def load(folder: Path) -> DraftModel:
    return DraftModel.load(folder, torch.float32, CPU)


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(DSparkError, match=f"lacks '{key}'"):
        DraftConfig.parse(draft_config(**{key: ...}), "config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"markov_rank": 0}, "markov_rank is 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"mask_token_id": 96}, "mask_token_id 96 is outside the vocabulary of 96"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [2, 0]}, "must strictly increase"),
        ({"target_layer_ids": [0, 4]}, "-1 .* and 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"enable_confidence_head": 1}, "enable_confidence_head is 1"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0 at top level and 10000.0"),
        ({"rope_theta": ..., "rope_parameters": ...}, "lacks 'rope_theta'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(DSparkError, match=words):
        DraftConfig.parse(draft_config(**change), "config.json")


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    config = draft_config()
    tensors = draft_tensors(config)

    def refused(name: str, changed: dict[str, torch.Tensor], words: str) -> None:
        with pytest.raises(DSparkError, match=words):
            load(save_draft(tmp_path / name, config, changed))

    refused("missing", {k: t for k, t in tensors.items() if k != "fc.weight"}, "lacks fc.weight")
    refused("bias", {k: t for k, t in tensors.items() if k != "confidence_head.proj.bias"}, "confidence_head.proj.bias")
    refused("unknown", tensors | {"markov_head.gate_proj.weight": torch.zeros(1)}, "holds markov_head.gate_proj.weight")
    wrong = tensors | {"norm.weight": torch.ones(33)}
    refused("shape", wrong, r"norm.weight has shape \[33\] and the config says \[32\]")


def test_a_damaged_or_absent_draft_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="does not exist"):
        load(tmp_path / "nowhere")
    folder = save_draft(tmp_path / "draft", draft_config())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DSparkError, match="not a whole safetensors file"):
        load(folder)
    weights.unlink()
    with pytest.raises(DSparkError, match="no such file"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DSparkError, match="not valid JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(DSparkError, match="not a JSON object"):
        load(folder)


def test_weights_in_several_files_load(tmp_path: Path) -> None:
    config = draft_config()
    tensors = draft_tensors(config)
    folder = save_draft(tmp_path / "draft", config, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for name, tensor in load(folder).state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DSparkError, match=r"model-00002-of-00002\.safetensors, and there is no such file"):
        load(folder)


def test_a_released_config_without_the_newer_keys_loads() -> None:
    """rope_theta alone at top level, no sample_from_anchor, no attention_bias: as drafts are published."""
    old = draft_config(rope_parameters=..., sample_from_anchor=..., attention_bias=..., layer_types=...)
    config = DraftConfig.parse(old, "config.json")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert not config.attention_bias


@pytest.mark.parametrize("with_markov", [True, False])
def test_attention_bias_and_optional_heads_load_and_count(tmp_path: Path, with_markov: bool) -> None:
    """Biases are read and used; the confidence head may be absent or look at the hidden state alone."""
    config = draft_config(attention_bias=True, confidence_head_with_markov=with_markov)
    tensors = draft_tensors(config)
    names = [f"layers.1.self_attn.{part}_proj.bias" for part in "qkvo"]
    draft = load(save_draft(tmp_path / "bias", config, tensors))
    features = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))

    def logits(model: DraftModel) -> torch.Tensor:
        context = model.new_context(8)
        model.extend_context(context, features)
        return model.propose(context, 4, lambda row: int(row.argmax()), width=1).logits

    with torch.inference_mode():
        before = logits(draft)
        for number, name in enumerate(names):
            changed = tensors | {name: tensors[name] + 1}
            after = logits(load(save_draft(tmp_path / f"bias{number}", config, changed)))
            if "k_proj" not in name:
                assert (after - before).abs().max() > 1e-3, name
    width = draft.confidence_head.proj.weight.shape[1]
    assert width == 32 + (8 if with_markov else 0)
    without = draft_config(enable_confidence_head=False)
    draft = load(save_draft(tmp_path / "none", without))
    context = draft.new_context(8)
    assert draft.propose(context, 4, lambda row: int(row.argmax())).confidence is None


def test_llama3_rope_scaling_is_transformers_own(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    draft = load(save_draft(tmp_path / "draft", draft_config(rope_parameters=scaling)))
    described = Qwen3Config(hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=dict(scaling))
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](described, CPU)
    torch.testing.assert_close(draft.inverse_frequencies, expected)
    assert draft.rotary_scale == scale == 1.0
    plain = load(save_draft(tmp_path / "plain", draft_config()))
    assert not torch.allclose(plain.inverse_frequencies, expected)


def test_targets_that_cannot_be_verified_are_refused(tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(DSparkError, match=words):
            Target.load(folder, torch.float32, CPU)

    refused(tmp_path / "nowhere", "holds no config.json")
    tiny = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8)
    GPT2LMHeadModel(tiny).save_pretrained(tmp_path / "gpt2")
    refused(tmp_path / "gpt2", "'gpt2' model; the verifier runs llama and qwen3")

    folder = save_target(tmp_path / "target", tiny_model("qwen3"))
    assert Target.load(folder, torch.float32, CPU).stop_ids == {0}
    config = json.loads((folder / "config.json").read_text())
    original = load_file(folder / "model.safetensors")

    partial = {name: tensor for name, tensor in original.items() if "layers.2.mlp.up_proj" not in name}
    save_file(partial, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, "lacks model.layers.2.mlp.up_proj.weight")
    save_file(original, folder / "model.safetensors", metadata={"format": "pt"})

    sliding = config | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(sliding))
    refused(folder, "sliding_attention.*full attention")
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    refused(folder, "eos_token_id")
    (folder / "config.json").write_text("{")
    refused(folder, "config")


def test_a_tied_target_loads(tmp_path: Path) -> None:
    """Tied embeddings are stored once; their absence as lm_head.weight is not an incomplete file."""
    folder = save_target(tmp_path / "target", tiny_model("llama", tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    target = Target.load(folder, torch.float32, CPU)
    assert target.model.lm_head.weight.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()


def test_a_target_without_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target", tiny_model("qwen3"))
    assert load_tokenizer(folder).chat_template
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DSparkError, match="no chat template"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DSparkError, match="cannot load the tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DSparkError, match="no tokenizer"):
        load_tokenizer(folder)


def test_serving_imports_nothing_of_training() -> None:
    """A difference between training and serving cannot hide in shared code."""
    files = sorted(Path(megatron_dspark.serving.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in ("megatron", "transformer_engine"), f"{file.name} imports {name}"
                allowed = tuple(f"megatron_dspark.{own}" for own in ("serving", "errors", "files", "sampling"))
                assert not name.startswith("megatron_dspark") or name.startswith(allowed), f"{file.name}: {name}"
