"""Reading a draft's folder: tensors come lazily and whole, and a folder without a single meaning is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.load import load_draft
from tests.hf_support import Tensors, add, forget, random_tensors, remove, rename, say, tiny_config, write_folder


def test_config_and_tensors_come_back(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    loaded, read = load_draft(write_folder(tmp_path / "draft", config, tensors))
    assert loaded == config
    assert set(read) == set(tensors) and len(read) == len(tensors)
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == torch.bfloat16 for name, tensor in tensors.items()
    )


def test_released_golden_weights_are_read(tmp_path: Path, fixtures: Path) -> None:
    for kind in ("vanilla", "gated"):
        golden = load_file(fixtures / "golden" / f"draft_{kind}.safetensors")
        weights = {name.removeprefix("w/"): tensor for name, tensor in golden.items() if name.startswith("w/")}
        config = tiny_config(markov_head_type=kind, dtype="float32")
        _, read = load_draft(write_folder(tmp_path / kind, config, weights))
        assert set(read) == set(weights) and all(torch.equal(read[name], weights[name]) for name in weights)


def shards(folder: Path, tensors: Tensors) -> dict[str, str]:
    """Split the weights over two files, in no particular order, and return the index."""
    names = sorted(tensors, key=lambda name: name[::-1])
    placed = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        placed.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return placed


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    config = tiny_config(markov_head_type="rnn", attention_bias=True)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "draft", config, tensors)
    shards(folder, tensors)
    _, read = load_draft(folder)
    assert set(read) == set(tensors) and all(torch.equal(read[name], tensors[name]) for name in tensors)


UNREADABLE = {
    "missing tensor": (remove("layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight is absent"),
    "lm_head absent": (remove("lm_head.weight"), r"lm_head\.weight is absent.*own copy"),
    "confidence without bias": (remove("confidence_head.proj.bias"), "no bias beside it"),
    "unknown tensor": (add("layers.0.self_attn.gate.weight", 4), r"self_attn\.gate\.weight does not belong"),
    "a layer too many": (add("layers.2.input_layernorm.weight", 64), "config.json describes 2 layers"),
    "model prefix": (rename("fc.weight", "model.fc.weight"), r"fc\.weight is absent"),
    "reduced vocabulary": (add("d2t", 64), "d2t does not belong.*reduced draft vocabulary"),
    "padded rows": (add("lm_head.weight", 192, 64), "has 192 rows, and config.json says vocab_size = 128"),
    "wrong shape": (add("fc.weight", 64, 64), r"fc\.weight has shape \[64, 64\], and config.json implies \[64, 192\]"),
    "other taps": (say(target_layer_ids=[1, 3]), r"fc\.weight has shape \[64, 192\]"),
    "other head": (say(markov_head_type="gated"), r"gate_proj\.weight is absent.*and 1 more"),
    "quantised": (say(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "partial rotary": (say(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "two rotary bases": (say(rope_theta=1e6), "1000000.0 at top level and 10000.0"),
    "no rotary base": (forget("rope_theta", "rope_parameters"), "rope_theta = None"),
    "scaled rotary": (say(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0}), "'yarn' rope scaling"),
    "rank 0": (say(markov_rank=0), "markov_rank = 0"),
    "slot 0 is the anchor": (say(sample_from_anchor=False), "sample_from_anchor = False"),
    "nested keys": (forget("mask_token_id"), "no 'mask_token_id' at top level"),
    "activation": (say(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "speculators": (say(transformer_layer_config={}), "the speculators layout"),
    "ModelOpt": (say(architectures=["DFlashDraftModel"]), "the ModelOpt layout"),
    "SpecForge": (say(architectures=["DSparkDraftModel"]), "the SpecForge layout"),
    "DeepSeek-V4": (say(dspark_block_size=5), "DeepSeek-V4's bundled layout"),
    "a language model": (forget("block_size", "target_layer_ids"), "it is not a draft"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_folder_without_one_meaning_is_refused(tmp_path: Path, case: str) -> None:
    change, words = UNREADABLE[case]
    config = tiny_config()
    tensors = random_tensors(config)
    change(config, tensors)
    with pytest.raises(DSparkError, match=words) as refusal:
        load_draft(write_folder(tmp_path / "draft", config, tensors))
    assert "draft" in str(refusal.value) and "\n" not in str(refusal.value)


def test_half_precision_other_than_bfloat16_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = {name: tensor.half() for name, tensor in random_tensors(config).items()}
    with pytest.raises(DSparkError, match="is stored as F16"):
        load_draft(write_folder(tmp_path / "draft", config, tensors))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="nowhere is not a folder"):
        load_draft(tmp_path / "nowhere")
    with pytest.raises(DSparkError, match="config was expected at"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(DSparkError, match="holds a list"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(DSparkError, match=r"neither model\.safetensors nor"):
        load_draft(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "draft", tiny_config())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DSparkError, match=r"model\.safetensors is not a whole safetensors file"):
        load_draft(folder)
    weights.write_bytes(b"")
    with pytest.raises(DSparkError, match="is not a whole safetensors file"):
        load_draft(folder)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "draft", config, tensors)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "model.safetensors"}}))
    with pytest.raises(DSparkError, match="two sets of weights"):
        load_draft(folder)
    placed = shards(folder, tensors)
    other = next(file for file in placed.values() if file != placed["fc.weight"])
    for weight_map, words in (
        ({**placed, "fc.weight": other}, r"names the tensor fc\.weight, and .* does not"),
        ({**placed, "fc.weight": "../elsewhere.safetensors"}, "outside its own folder"),
        ({name: "absent.safetensors" for name in placed}, "there is no such file"),
        ({}, "no 'weight_map'"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(DSparkError, match=words):
            load_draft(folder)
