"""Drafts of other tools are told by their content, converted without changing a bit, or refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.convert import import_draft, open_draft
from megatron_dspark.hf.foreign import recognise
from megatron_dspark.hf.lint import lint_folder
from megatron_dspark.hf.load import load_draft
from megatron_dspark.hf.speculators import speculators_config
from tests.hf_support import TARGET, Tensors, random_tensors, tiny_config, write_folder

VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no confidence": {"enable_confidence_head": False},
    "confidence without markov": {"confidence_head_with_markov": False},
    "biases": {"attention_bias": True},
}
FLAT = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def write_target(folder: Path, tables: Tensors, **changes: Any) -> Path:
    """A target's folder that holds embedding and LM head alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    weights = {"model.embed_tokens.weight": tables["embed_tokens.weight"]}
    if not changes.get("tie_word_embeddings"):
        weights["lm_head.weight"] = tables["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


def without_replicas(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}


def deepspec(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """As released: no rope_parameters, no sample_from_anchor."""
    released = {key: value for key, value in config.items() if key not in ("rope_parameters", "sample_from_anchor")}
    return {**released, "use_sliding_window": False, "max_window_layers": 8}, tensors


def specforge(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Taps and mask nested; transformers leaves out the config's defaults and writes the rotary base nested."""
    nested = {"target_layer_ids": config["target_layer_ids"], "mask_token_id": config["mask_token_id"]}
    left_out = ("target_layer_ids", "mask_token_id", "sample_from_anchor", "rope_theta", "attention_bias", "hidden_act")
    own = {key: value for key, value in config.items() if key not in (*left_out, *HEAD_KEYS)}
    if config["attention_bias"]:
        own["attention_bias"] = True
    return (
        {**own, "architectures": ["DSparkDraftModel"], "model_type": "dspark", "dflash_config": nested},
        without_replicas(tensors),
    )


def modelopt(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Everything of DSpark nested, flat head names, no embeddings."""
    nested = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": config["target_layer_ids"],
        "causal": False,
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": config["markov_rank"],
        "markov_head_type": config["markov_head_type"],
        "use_confidence_head": config["enable_confidence_head"],
    }
    left_out = ("target_layer_ids", "mask_token_id", "sample_from_anchor", "rope_parameters", "num_anchors", "dtype")
    own = {key: value for key, value in config.items() if key not in (*left_out, *HEAD_KEYS)}

    def flat(name: str) -> str:
        for prefix, replacement in FLAT.items():
            name = replacement + name.removeprefix(prefix) if name.startswith(prefix) else name
        return name

    weights = {flat(name): tensor for name, tensor in without_replicas(tensors).items()}
    return {**own, "architectures": ["DFlashDraftModel"], "rope_scaling": None, "dflash_config": nested}, weights


def speculators(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Backbone nested and only where it differs from Qwen3Config's defaults; taps from 1; a stray target tensor."""
    written = speculators_config(config, ["LlamaForCausalLM"], "someone/target")
    for key in ("hidden_act", "attention_dropout", "rms_norm_eps", "use_cache"):
        del written["transformer_layer_config"][key]
    del written["num_target_layers"], written["tie_word_embeddings"]
    # The target ties its embeddings: the flag says nothing of the draft.
    written["transformer_layer_config"]["tie_word_embeddings"] = True
    written["speculators_version"] = "0.8.1"
    return written, {**without_replicas(tensors), "verifier_norm.weight": torch.ones(64)}


LAYOUTS = {"deepspec": deepspec, "specforge": specforge, "modelopt": modelopt, "speculators": speculators}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_becomes_the_same_draft(tmp_path: Path, layout: str, variant: str) -> None:
    config = tiny_config(**VARIANTS[variant])
    tensors = random_tensors(config)
    foreign, weights = LAYOUTS[layout](config, tensors)
    if layout == "speculators":
        weights["verifier_norm.weight"] = weights["verifier_norm.weight"].bfloat16()
    write_folder(tmp_path / "in", foreign, weights)
    target = write_target(tmp_path / "target", tensors)
    report = import_draft(tmp_path / "in", tmp_path / "out", target=target)
    written, read = load_draft(tmp_path / "out")
    if layout == "modelopt":
        config["num_anchors"] = 512  # it does not say: training only
    assert written == config, {key for key in {*written, *config} if written.get(key) != config.get(key)}
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    assert lint_folder(tmp_path / "out").ok and report.layout == "deepspec"
    record = json.loads((tmp_path / "out" / "dspark_export.json").read_text())["imported"]
    assert record["layout"] == layout
    assert record["taken_from_target"] == ([] if layout == "deepspec" else ["embed_tokens.weight", "lm_head.weight"])
    assert record["left_out"] == (["verifier_norm.weight"] if layout == "speculators" else [])
    assert len(record["weights_sha256"]["model.safetensors"]) == 64


def test_the_speculators_layout_goes_out_and_comes_back(tmp_path: Path) -> None:
    for kind in ("vanilla", "rnn"):
        config = tiny_config(markov_head_type=kind, dtype="float32")
        tensors = random_tensors(config)
        folder = write_folder(tmp_path / kind / "in", config, tensors)
        report = import_draft(folder, tmp_path / kind / "speculators", layout="speculators")
        written = json.loads((tmp_path / kind / "speculators" / "config.json").read_text())
        assert written["aux_hidden_state_layer_ids"] == [2, 4, 6] and "target_layer_ids" not in written
        assert written["sample_from_anchor"] is True and written["draft_vocab_size"] == 128
        assert written["transformer_layer_config"]["rope_theta"] == 10000.0
        assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
        assert report.layout == "speculators"
        assert [verdict.engine for verdict in report.engines if verdict.loads] == (
            ["vllm_0.26_0.33"] if kind == "vanilla" else []
        )
        # Without the target: this library's own export says the target's depth and holds the replicas.
        import_draft(tmp_path / kind / "speculators", tmp_path / kind / "back")
        back, read = load_draft(tmp_path / kind / "back")
        assert back == config and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_tied_target_gives_its_embedding_twice(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    write_folder(tmp_path / "in", *specforge(config, tensors))
    target = write_target(tmp_path / "target", tensors, tie_word_embeddings=True)
    import_draft(tmp_path / "in", tmp_path / "out", target=target)
    _, read = load_draft(tmp_path / "out")
    assert torch.equal(read["lm_head.weight"], tensors["embed_tokens.weight"])


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    write_folder(tmp_path / "in", *modelopt(config, tensors))
    opened = open_draft(tmp_path / "in", write_target(tmp_path / "target", tensors))
    assert len(opened.tensors) == len(tensors) and set(opened.tensors) == set(tensors)
    (tmp_path / "target" / "model.safetensors").unlink()
    assert torch.equal(opened.tensors["fc.weight"], tensors["fc.weight"])
    with pytest.raises(DSparkError, match="no tensor"):
        opened.tensors["embed_tokens.weight"]


def nested(**values: Any) -> Any:
    return lambda config, tensors: config["dflash_config"].update(values)


def top(**values: Any) -> Any:
    return lambda config, tensors: config.update(values)


def no(*keys: str) -> Any:
    return lambda config, tensors: [config.pop(key) for key in keys]


def backbone(**values: Any) -> Any:
    return lambda config, tensors: config["transformer_layer_config"].update(values)


def tensor(name: str, *shape: int) -> Any:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)})


def lose(name: str) -> Any:
    return lambda config, tensors: tensors.pop(name)


REFUSED = {
    "not a draft": ("deepspec", no("target_layer_ids"), "names no target_layer_ids"),
    "DeepSeek-V4": ("deepspec", top(dspark_block_size=5), "DeepSeek-V4's bundled layout"),
    "another method": ("modelopt", nested(projector_type="domino"), "projector_type = 'domino'"),
    "slot 0 repeats the anchor": ("modelopt", nested(shift_label=False), "shift_label = False"),
    "causal blocks": ("modelopt", nested(causal=True), "causal = True"),
    "sliding window": ("modelopt", nested(use_swa=True), "use_swa = True"),
    "a sink": ("modelopt", nested(attention_sink_bias=True), "attention_sink_bias = True"),
    "scaled rotary": (
        "modelopt",
        top(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "'yarn' rope scaling",
    ),
    "no mask token": (
        "specforge",
        lambda config, tensors: config["dflash_config"].pop("mask_token_id"),
        "mask_token_id",
    ),
    "no block size": ("specforge", no("block_size"), "block_size"),
    "no rotary base": ("specforge", no("rope_parameters"), "does not say rope_theta"),
    "two mask tokens": ("specforge", top(mask_token_id=3), "mask_token_id = 3 at top level and 127"),
    "no confidence bias": ("specforge", lose("confidence_head.proj.bias"), "no bias beside it"),
    "no head": ("specforge", lose("markov_head.markov_w1.weight"), "markov_rank"),
    "rank 0": ("specforge", top(markov_rank=0), "markov_rank = 0"),
    "an unknown tensor": ("specforge", tensor("layers.0.sink.weight", 4), "does not belong to this layout"),
    "gated attention": ("specforge", top(attn_output_gate=True), "attn_output_gate"),
    "quantised": ("specforge", top(quantization_config={"bits": 4}), "quantization_config"),
    "last-layer tap": ("speculators", top(aux_hidden_state_layer_ids=[2, 4, 8]), "tap 7 is the last of 8 layers"),
    "no taps": ("speculators", no("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids"),
    "slot 0 unsaid": ("speculators", no("sample_from_anchor"), "vLLM takes false where it is absent"),
    "slot 0 is the anchor": ("speculators", top(sample_from_anchor=False), "sample_from_anchor = False"),
    "EAGLE-3": ("speculators", top(speculators_model_type="eagle3"), "'eagle3'; only 'dspark'"),
    "reduced vocabulary": ("speculators", top(draft_vocab_size=64), "64 of the target's 128 tokens"),
    "renumbered vocabulary": ("speculators", tensor("d2t", 128), "d2t, a renumbering"),
    "narrower than the target": ("speculators", top(target_hidden_size=128), "target_hidden_size = 128"),
    "sliding layers": ("speculators", backbone(layer_types=["sliding_attention"] * 2), "'full_attention' 2 times"),
    "another activation": ("speculators", backbone(hidden_act="gelu"), "hidden_act = 'gelu'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_or_different_is_named(tmp_path: Path, case: str) -> None:
    layout, spoil, words = REFUSED[case]
    config = tiny_config()
    tensors = random_tensors(config)
    foreign, weights = LAYOUTS[layout](json.loads(json.dumps(config)), dict(tensors))
    weights.pop("verifier_norm.weight", None)
    spoil(foreign, weights)
    write_folder(tmp_path / "in", foreign, weights)
    target = write_target(tmp_path / "target", tensors)
    with pytest.raises(DSparkError, match=words) as refusal:
        import_draft(tmp_path / "in", tmp_path / "out", target=target)
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["specforge", "modelopt", "speculators"])
def test_the_target_is_asked_for_where_the_files_lack_its_tables(tmp_path: Path, layout: str) -> None:
    config = tiny_config()
    foreign, weights = LAYOUTS[layout](config, random_tensors(config))
    weights.pop("verifier_norm.weight", None)
    write_folder(tmp_path / "in", foreign, weights)
    wanted = "num_target_layers" if layout == "speculators" else "no embed_tokens.weight and no lm_head.weight"
    with pytest.raises(DSparkError, match=rf"{wanted}.*--target"):
        open_draft(tmp_path / "in")


def test_another_target_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    write_folder(tmp_path / "in", *specforge(config, tensors))
    target = write_target(tmp_path / "target", tensors, num_hidden_layers=12)
    with pytest.raises(DSparkError, match="num_hidden_layers is 8, and this target's config says 12"):
        open_draft(tmp_path / "in", target)


def test_half_and_mixed_types_need_a_choice(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    write_folder(tmp_path / "half", config, halves)
    with pytest.raises(DSparkError, match=r"stored as F16.*--dtype"):
        import_draft(tmp_path / "half", tmp_path / "out")
    import_draft(tmp_path / "half", tmp_path / "out", dtype="float32")
    _, read = load_draft(tmp_path / "out")
    assert torch.equal(read["fc.weight"], halves["fc.weight"].float())
    write_folder(tmp_path / "fp8", config, {**tensors, "fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)})
    with pytest.raises(DSparkError, match="F8_E4M3; only plain floats"):
        import_draft(tmp_path / "fp8", tmp_path / "out2")


def test_content_decides_and_not_the_architecture_s_name() -> None:
    config = tiny_config()
    flat, weights = modelopt(config, random_tensors(config))
    for architectures in (["DFlashDraftModel"], ["Qwen3DSparkModel"], None):
        assert recognise({**flat, "architectures": architectures}, weights) == "modelopt"
    assert recognise({**config, "architectures": ["DSparkDraftModel"]}, random_tensors(config)) == "deepspec"


def test_the_record_of_an_own_export_is_carried_over(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path / "in", config)
    own = {"tau": 2.5, "data": {"sha256": "ab"}, "trained_tables": ["lm_head.weight"]}
    (folder / "dspark_export.json").write_text(json.dumps({**own, "schema": "old"}))
    import_draft(folder, tmp_path / "out", layout="speculators")
    record = json.loads((tmp_path / "out" / "dspark_export.json").read_text())
    assert {key: record[key] for key in own} == own and record["schema"] == "megatron-dspark/export/1"
