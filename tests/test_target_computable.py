"""Targets that Megatron-Core computes as transformers does, and those that are refused because it would not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dspark.errors import DSparkError
from megatron_dspark.targets.computable import check_computable
from megatron_dspark.targets.folder import read_target_config
from megatron_dspark.training.run import train
from tests.test_capture import colocated, save_target
from tests.test_training import tiny_settings

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
COMPUTED = {
    "RoPE scaling of Llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 64}),
    "linear RoPE scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "wide heads": ("llama", {"head_dim": 32}),
    "narrow heads": ("qwen3", {"head_dim": 8}),
    "a window that no layer uses": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 8}),
    "a window that is switched off": ("qwen3", {"use_sliding_window": False, "sliding_window": 8}),
    "a Llama that names a window": ("llama", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "no tied embeddings": ("llama", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_final_hidden_states_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = COMPUTED[case]
    reference = save_target(tmp_path, kind, **changes)
    ids = torch.randint(0, 131, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference.model(ids).last_hidden_state
    found = colocated(tmp_path).target.capture(ids).final_hidden.transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def rope(kind: str, **more: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


CONFIGS = {
    "attention bias": ("qwen3", {"attention_bias": True}, "attention_bias True"),
    "attention bias of a Llama": ("llama", {"attention_bias": True}, "attention_bias True"),
    "bias in the MLP": ("llama", {"mlp_bias": True}, "mlp_bias True"),
    "another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu', and only 'silu' has been compared"),
    "sliding layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
        "sliding_attention",
    ),
    "linear scaling of a Qwen3": ("qwen3", rope("linear", factor=4.0), "RoPE scaling of type 'linear'"),
    "yarn": ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=64), "type 'yarn'"),
    "dynamic scaling": ("llama", rope("dynamic", factor=4.0), "type 'dynamic'"),
    "Llama 3 scaling from another length": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
        "original_max_position_embeddings 64 .* 8192 always",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_would_be_computed_differently_is_refused(case: str, tmp_path: Path) -> None:
    kind, changes, sentence = CONFIGS[case]
    save_target(tmp_path, kind, **changes)
    with pytest.raises(DSparkError, match=f"{sentence}.* --source hf"):
        check_computable(read_target_config(tmp_path))
    with pytest.raises(DSparkError, match=sentence):
        colocated(tmp_path)
    with pytest.raises(DSparkError, match=sentence):
        train(tiny_settings(tmp_path / "run", target=tmp_path))
    assert not (tmp_path / "run").exists()


def old_names(config: dict) -> None:
    """As config files were before transformers 5, and as Llama's still are."""
    scaling = {**config.pop("rope_parameters"), "factor": 4.0, "type": "yarn"}
    config.update(rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling)
    del scaling["rope_type"]


EDITS: dict[str, tuple[Callable[[dict], object], str]] = {
    "quantised": (lambda config: config.update(quantization_config={"quant_method": "fp8"}), "quantised .* fp8"),
    "listed sliding layers": (
        lambda config: config.update(layer_types=["full_attention", "sliding_attention"] * 4),
        "sliding_attention",
    ),
    "sliding layers of the default width": (
        lambda config: (
            [config.pop(key) for key in ("sliding_window", "layer_types", "max_window_layers")],
            config.update(use_sliding_window=True, max_window_layers=4),
        ),
        "sliding_attention",
    ),
    "partial rotary": (lambda config: config.update(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    "RoPE scaling under its old name": (old_names, "type 'yarn'"),
}


@pytest.mark.parametrize("case", EDITS)
def test_config_files_that_say_so_are_refused(case: str, tmp_path: Path) -> None:
    save_target(tmp_path, "qwen3")
    check_computable(read_target_config(tmp_path))
    change, sentence = EDITS[case]
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DSparkError, match=sentence):
        check_computable(read_target_config(tmp_path))


def test_packed_weights_are_quantised_and_not_missing(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    save_file({name.replace("_proj.weight", "_proj.qweight"): value for name, value in load_file(file).items()}, file)
    with pytest.raises(DSparkError, match=r"has quantised weights \(quantization_config, gptq\)"):
        check_computable(read_target_config(tmp_path))


def test_tensors_that_are_missing_or_would_not_be_read_are_refused(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    target = read_target_config(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({**whole, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    # What transformers does not open beside it.
    save_file({"layers.0.attention.wq.weight": torch.ones(8)}, tmp_path / "consolidated.safetensors")
    check_computable(target)
    save_file({**whole, "model.layers.3.self_attn.q_proj.weight_scale_inv": torch.ones(1)}, file)
    with pytest.raises(DSparkError, match=r"holds 1 tensors .*q_proj.weight_scale_inv; its features .* --source hf"):
        check_computable(target)
    save_file({name: tensor for name, tensor in whole.items() if ".5.mlp" not in name}, file)
    with pytest.raises(DSparkError, match=r"lacks 3 of its tensors, .*model.layers.5.mlp.down_proj.weight; download"):
        check_computable(target)


def test_a_download_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    weight_map = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        DSparkError, match=r"has no file model-00002-of-00002.safetensors, .*index.json names; download"
    ):
        check_computable(read_target_config(tmp_path))


def test_a_config_as_llama_2_has_it(tmp_path: Path) -> None:
    """Without a rotary base, and with a scaling that says null."""
    reference = save_target(tmp_path, "llama", tie_word_embeddings=False, num_key_value_heads=4)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "rope_theta", "head_dim", "attention_bias", "mlp_bias"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": None, "pretraining_tp": 1}))
    ids = torch.randint(0, 131, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference.model(ids).last_hidden_state
    found = colocated(tmp_path).target.capture(ids).final_hidden.transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert read_target_config(tmp_path).rope_theta == 10000.0
