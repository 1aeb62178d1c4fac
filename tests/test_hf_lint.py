"""Lint: every broken rule has its sentence, and every engine its verdict."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf import lint
from megatron_dspark.hf.lint import lint_folder
from megatron_dspark.hf.rules import REQUIRED_KEYS
from megatron_dspark.hf.speculators import speculators_config
from tests.hf_support import (
    Change,
    Tensors,
    add,
    forget,
    random_tensors,
    remove,
    rename,
    say,
    tiny_config,
    write_folder,
)

ALL = {"vllm_0.26_0.33", "sglang_0.5.23", "mlx_dspark_0.20.3", "trtllm_main", "llamacpp"}


def report(folder: Path, *changes: Change, **settings: Any) -> lint.LintReport:
    config = tiny_config(**settings)
    tensors = random_tensors(config)
    for change in changes:
        change(config, tensors)
    return lint_folder(write_folder(folder / "draft", config, tensors))


def loading(result: lint.LintReport) -> set[str]:
    return {verdict.engine for verdict in result.engines if verdict.loads}


def test_the_packaged_table_is_the_reference(fixtures: Path) -> None:
    packaged = Path(lint.__file__).with_name("engine_compat.json")
    assert packaged.read_bytes() == (fixtures / "engine_compat.json").read_bytes()


def test_a_vanilla_draft_is_clean_and_loads_everywhere(tmp_path: Path) -> None:
    result = report(tmp_path)
    assert result.ok and loading(result) == ALL
    assert result.engine("mlx").executed and not result.engine("vllm").executed


def test_other_heads_load_in_sglang_only(tmp_path: Path) -> None:
    for kind in ("gated", "rnn"):
        result = report(tmp_path / kind, markov_head_type=kind)
        assert result.ok and loading(result) == {"sglang_0.5.23"}
        assert f"this draft's is '{kind}'" in result.engine("vllm").reasons[0]


def test_no_confidence_head_is_fine(tmp_path: Path) -> None:
    result = report(tmp_path, enable_confidence_head=False)
    assert result.ok and loading(result) == ALL


# Change, the rule that it breaks, words of the sentence, the engines that still load it.
BROKEN: dict[str, tuple[Change, str, str, set[str]]] = {
    "rank 0": (say(markov_rank=0), "markov-rank", "a rank above 0", set()),
    "confidence bias missing": (remove("confidence_head.proj.bias"), "confidence-bias", "no bias", {"llamacpp"}),
    "flat head name": (
        rename("markov_head.markov_w1.weight", "markov_w1.weight"),
        "unknown-tensors",
        "flat sequential-head name",
        {"trtllm_main"},
    ),
    "flat confidence name": (
        rename("confidence_head.proj.weight", "confidence_proj.weight"),
        "unknown-tensors",
        "flat confidence name",
        {"trtllm_main"},
    ),
    "model prefix": (rename("norm.weight", "model.norm.weight"), "unknown-tensors", "'model.' prefix", set()),
    "lm_head absent": (remove("lm_head.weight"), "frozen-replicas", "own copy", ALL - {"trtllm_main"}),
    "embedding absent": (remove("embed_tokens.weight"), "frozen-replicas", "own copy", ALL - {"trtllm_main"}),
    "layer tensor absent": (
        remove("layers.0.self_attn.q_norm.weight"),
        "missing-tensors",
        "q_norm.weight is absent",
        set(),
    ),
    "padded vocabulary": (add("markov_head.markov_w2.weight", 192, 8), "padded-rows", "cut the padded rows", set()),
    "wrong shape": (add("fc.weight", 64, 64), "tensor-shapes", "the folder mixes two drafts", set()),
    "unknown backbone tensor": (
        add("layers.0.extra.weight", 3),
        "unknown-tensors",
        "does not belong",
        {"sglang_0.5.23", "trtllm_main", "llamacpp"},
    ),
    "unknown head tensor": (
        add("markov_head.extra.weight", 3),
        "unknown-tensors",
        "does not belong",
        {"trtllm_main", "llamacpp"},
    ),
    "last-layer tap": (say(target_layer_ids=[1, 3, 7]), "taps", "tap 7 is the last of 8 layers", set()),
    "embedding tap": (say(target_layer_ids=[-1, 3, 5]), "taps", "tap -1 is the embedding output", set()),
    "partial rotary copied": (say(partial_rotary_factor=0.25), "target-only-fields", "partial_rotary_factor", set()),
    "gated attention copied": (say(attn_output_gate=True), "target-only-fields", "attn_output_gate", set()),
    "quantisation copied": (say(quantization_config={"bits": 4}), "target-only-fields", "quantization_config", set()),
    "experts copied": (say(num_experts=8), "target-only-fields", "num_experts = 8", ALL),
    "window copied": (say(sliding_window=4096), "target-only-fields", "sliding_window = 4096", ALL),
    "rotary base at top level only": (forget("rope_parameters"), "top-level-keys", "'rope_parameters'", ALL),
    "rotary base nested only": (forget("rope_theta"), "top-level-keys", "'rope_theta'", ALL),
    "two rotary bases": (say(rope_theta=5e5), "rope-theta", "500000.0 at top level and 10000.0", set()),
    "scaled rotary copied": (
        say(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "rope-scaling",
        "'llama3' rope scaling",
        set(),
    ),
    "slot 0 unsaid": (forget("sample_from_anchor"), "top-level-keys", "'sample_from_anchor'", ALL),
    "slot 0 is the anchor": (say(sample_from_anchor=False), "sample-from-anchor", "slot 0", set()),
    "other architecture": (
        say(architectures=["Qwen3ForCausalLM"]),
        "architectures",
        "Qwen3DSparkModel",
        {"trtllm_main"},
    ),
    "tied": (say(tie_word_embeddings=True), "tie-word-embeddings", "False", set()),
    "sliding layer": (say(layer_types=["sliding_attention"] * 2), "layer-types", "'full_attention' 2 times", set()),
    "mask outside": (say(mask_token_id=500), "mask-token-id", "outside the vocabulary of 128", set()),
    "dtype disagrees": (say(dtype="float32"), "dtype", "config.json says float32 and the tensors are bfloat16", ALL),
    "another method": (say(method="dflash"), "method", "method = 'dflash'", set()),
    "another projector": (
        say(dflash_config={"projector_type": "dflash"}),
        "method",
        "dflash_config.projector_type = 'dflash'",
        set(),
    ),
    "tap shift": (
        say(aux_hidden_state_layer_ids=[1, 3, 5]),
        "tap-shift",
        "the first counts from 1 and has to be [2, 4, 6]",
        set(),
    ),
    "tap shift in the nested copy": (
        say(dflash_config={"target_layer_ids": [2, 4, 6]}),
        "nested-keys",
        "target_layer_ids = [1, 3, 5] at top level and [2, 4, 6] in dflash_config",
        set(),
    ),
    "two mask tokens": (say(dspark_config={"mask_token_id": 3}), "nested-keys", "mask_token_id = 127", set()),
    "causal block": (say(is_causal=True), "block-visibility", "sees only earlier slots", set()),
    "causal block, another key": (say(causal=True), "block-visibility", "causal = True", set()),
    "causal block, nested": (
        say(dspark_config={"causal": True}),
        "block-visibility",
        "dspark_config.causal = True",
        set(),
    ),
    "expert routing copied": (say(n_group=8), "target-only-fields", "n_group", ALL),
    "reduced vocabulary": (say(draft_vocab_size=64), "draft-vocabulary", "draft_vocab_size = 64", set()),
    "local path": (say(source="/scratch/someone/target"), "local-paths", "/scratch/someone/target", ALL),
}


# The load failures that users of serving engines have reported, each with the case above that names it.
REPORTED = {
    "zero Markov rank": "rank 0",
    "wrong method key": "another method",
    "method chosen by the projector": "another projector",
    "confidence weight without bias": "confidence bias missing",
    "flat Markov names": "flat head name",
    "flat confidence names": "flat confidence name",
    "model. prefix": "model prefix",
    "tap ids shifted by one": "tap shift",
    "nested tap ids that disagree": "tap shift in the nested copy",
    "last-layer tap": "last-layer tap",
    "embedding tap": "embedding tap",
    "rows of a padded vocabulary": "padded vocabulary",
    "partial rotary copied from the target": "partial rotary copied",
    "rotary base in one place only": "rotary base at top level only",
    "lm_head absent": "lm_head absent",
    "sample_from_anchor not written": "slot 0 unsaid",
    "embeddings tied": "tied",
    "attention gate copied from the target": "gated attention copied",
    "a path of the training machine": "local path",
}


def test_every_reported_load_failure_is_a_case() -> None:
    assert len(set(REPORTED.values())) == len(REPORTED) >= 16 and set(REPORTED.values()) <= set(BROKEN)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_has_its_sentence_and_its_victims(tmp_path: Path, case: str) -> None:
    change, rule, words, still_loading = BROKEN[case]
    result = report(tmp_path, change)
    sentences = [problem.sentence for problem in result.problems if problem.rule == rule]
    assert not result.ok and any(words in sentence for sentence in sentences), result.problems
    # "other architecture" is mlx's business too: it selects on the model type alone.
    expected = still_loading | ({"mlx_dspark_0.20.3"} if case == "other architecture" else set())
    assert loading(result) == expected
    for verdict in result.engines:
        assert verdict.loads == (not verdict.reasons)


def test_nested_keys_are_found_where_they_stand(tmp_path: Path) -> None:
    nested = say(dflash_config={"mask_token_id": 127, "target_layer_ids": [1, 3, 5]})
    result = report(tmp_path, nested, forget("mask_token_id"))
    assert "stands inside 'dflash_config'" in result.problems[0].sentence
    assert loading(result) == {"vllm_0.26_0.33", "trtllm_main", "llamacpp"}


def test_mixed_dtypes_are_one_problem(tmp_path: Path) -> None:
    def widen(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float()

    result = report(tmp_path, widen)
    assert [problem.sentence for problem in result.problems] == [
        "the tensors have several dtypes, BF16 and F32; store one"
    ]


def test_paths_in_the_export_s_record_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "draft", tiny_config())
    (folder / "dspark_export.json").write_text(json.dumps({"run": {"target": "/data/models/x"}}))
    (problem,) = lint_folder(folder).problems
    assert "'/data/models/x' at run > target" in problem.sentence


def test_engines_that_leave_a_trained_table_out_will_not_serve_the_draft(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "draft", tiny_config())
    for trained, expected in (
        ([], ALL),
        (["lm_head.weight"], ALL - {"sglang_0.5.23", "llamacpp"}),
        (["embed_tokens.weight"], ALL - {"sglang_0.5.23", "llamacpp"}),
    ):
        (folder / "dspark_export.json").write_text(json.dumps({"trained_tables": trained}))
        result = lint_folder(folder)
        assert result.ok and loading(result) == expected
    assert "takes the target's embed_tokens.weight" in result.engine("sglang").reasons[0]


def test_a_config_of_wrong_types_is_reported_and_does_not_crash(tmp_path: Path) -> None:
    for key in REQUIRED_KEYS:
        for wrong in (None, "x", [], {}, -3, True):
            config = {**tiny_config(), key: wrong}
            folder = write_folder(tmp_path / f"{key}-{wrong}", config, {"fc.weight": torch.zeros(1)})
            assert not lint_folder(folder).ok


def test_the_report_is_plain_and_readable(tmp_path: Path) -> None:
    result = report(tmp_path, remove("lm_head.weight"), say(block_size=6))
    plain = json.loads(json.dumps(result.as_dict()))
    assert plain["ok"] is False and plain["problems"][0]["rule"] == "frozen-replicas"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result.render())
    text = console.export_text()
    assert "frozen-replicas" in text and "sglang_0.5.23" in text
    assert '\'{"method":"dspark","model":"DRAFT","num_speculative_tokens":6}\'' in result.engine("vllm").launch


def speculators_folder(folder: Path, **changes: Any) -> Path:
    config = tiny_config()
    written = {**speculators_config(config, ["LlamaForCausalLM"]), **changes}
    written = {key: value for key, value in written.items() if value is not None}
    return write_folder(folder, written, random_tensors(config))


def test_the_speculators_layout_is_linted_in_its_own_terms(tmp_path: Path) -> None:
    result = lint_folder(speculators_folder(tmp_path / "good"))
    assert result.ok and loading(result) == {"vllm_0.26_0.33"}
    assert "it reads the DeepSpec layout" in result.engine("sglang").reasons[0]
    # mlx-dspark 0.20.3 starts with such a folder and reads the layer after each tap (its config.py).
    assert "does not take 1 off its tap ids" in result.engine("mlx").reasons[0] and not result.engine("mlx").executed
    unsaid = lint_folder(speculators_folder(tmp_path / "unsaid", sample_from_anchor=None))
    assert not unsaid.ok and loading(unsaid) == set() and "vLLM takes false" in unsaid.problems[0].sentence
    last = lint_folder(speculators_folder(tmp_path / "last", aux_hidden_state_layer_ids=[2, 4, 8]))
    assert not last.ok and "tap 7 is the last of 8 layers" in last.problems[0].sentence


def test_the_layouts_of_other_tools_are_named_first(tmp_path: Path) -> None:
    from tests.test_hf_import import modelopt, specforge

    config = tiny_config()
    for layout, words in ((specforge, "the SpecForge layout"), (modelopt, "the ModelOpt layout")):
        result = lint_folder(write_folder(tmp_path / words, *layout(config, random_tensors(config))))
        assert words in result.problems[0].sentence and "megatron-dspark import" in result.problems[0].sentence
        assert not result.ok and "mlx_dspark_0.20.3" not in loading(result)


def test_the_verb_ends_with_an_error_where_the_engine_refuses(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from megatron_dspark.cli import lint as verb

    folder = write_folder(tmp_path / "draft", tiny_config(markov_head_type="gated"))
    verb(folder, engine=None, as_json=False)
    verb(folder, engine="sglang", as_json=False)
    with pytest.raises(DSparkError, match=r"vllm_0.26_0.33 will not load draft: .*vanilla Markov head"):
        verb(folder, engine="vllm", as_json=False)
    broken = write_folder(tmp_path / "broken", {**tiny_config(), "tie_word_embeddings": True})
    with pytest.raises(typer.Exit) as ended:
        verb(broken, engine=None, as_json=False)
    assert ended.value.exit_code == 1


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    result = report(tmp_path)
    with pytest.raises(DSparkError, match="choose one of vllm"):
        result.engine("tgi")


def test_a_folder_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="is not a folder"):
        lint_folder(tmp_path / "nowhere")


def test_reading_and_linting_need_no_megatron() -> None:
    code = "import sys, megatron_dspark.hf.lint, megatron_dspark.hf.export; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
