"""The model card (README.md) of an exported draft, written from its config, its record and the engines' verdicts.

Nothing stands in it that is not in those: what was not measured is said to be not measured.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dspark.hf.lint import EngineVerdict

CARD_FILE = "README.md"

# How each engine is pointed at a draft. vLLM's and SGLang's options stand in engine_compat.json; TensorRT-LLM's are of
# `tensorrt_llm.llmapi.DSparkDecodingConfig` in its documentation, mlx-dspark's of its command line (0.20.3),
# llama.cpp's of its pull requests 25173 and 25549.
_SERVE = {
    "vllm": "```\nvllm serve TARGET {launch}\n```",
    "sglang": "```\npython -m sglang.launch_server --model-path TARGET {launch}\n```",
    "mlx": '```\nmlx-dspark generate --mode dspark --model TARGET --drafter DRAFT --prompt "..."\n```',
    "trtllm": "```python\n"
    "from tensorrt_llm import LLM\n"
    "from tensorrt_llm.llmapi import DSparkDecodingConfig\n\n"
    'LLM("TARGET", speculative_config=DSparkDecodingConfig(max_draft_len={block_size}, speculative_model="DRAFT"))\n'
    "```",
    "llamacpp": "```\n"
    "python convert_hf_to_gguf.py TARGET --outtype bf16 --outfile target.gguf\n"
    "python convert_hf_to_gguf.py DRAFT --target-model-dir TARGET --outtype bf16 --outfile draft.gguf\n"
    "llama-server -m target.gguf -md draft.gguf --spec-type draft-dspark --spec-draft-n-max {block_size}\n"
    "```",
}
_CONVENTIONS = (
    ("loss_normalizer", "loss divided by"),
    ("loss_decay_gamma", "slot k weighs exp(−k / γ), γ ="),
    ("ce_loss_weight", "weight of cross entropy"),
    ("l1_loss_weight", "weight of the raw L1 distance"),
    ("confidence_loss_weight", "weight of the confidence loss"),
    ("detach_confidence_features", "confidence loss kept from the backbone"),
)


def write_model_card(
    folder: Path, name: str, config: Mapping[str, Any], record: Mapping[str, Any], engines: Iterable["EngineVerdict"]
) -> None:
    """Write README.md into an export's folder.

    Args:
        folder: where the export is being written, or stands.
        name: the draft's name.
        config: its config in the DeepSpec layout.
        record: its dspark_export.json.
        engines: the engines' verdicts on the folder.
    """
    (folder / CARD_FILE).write_text(model_card(name, config, record, list(engines)), encoding="utf-8")


def model_card(name: str, config: Mapping[str, Any], record: Mapping[str, Any], engines: list["EngineVerdict"]) -> str:
    """The card's text (Markdown with the Hub's YAML head)."""
    target = record.get("target") or {}
    hub_id = target.get("hub_id")
    head = ["---", "tags:", "- speculative-decoding", "- dspark", "- megatron-dspark"]
    head += [f"base_model: {hub_id}"] if hub_id else []
    called = hub_id or target.get("name") or "the target that it was trained against"
    taps = ", ".join(str(tap) for tap in config["target_layer_ids"])
    confidence = "with" if config["enable_confidence_head"] else "without"
    parts = [
        "\n".join([*head, "---"]),
        f"# {name}",
        f"A DSpark drafter ([arXiv:2607.05147](https://arxiv.org/abs/2607.05147)) for **{called}**. It proposes "
        f"{config['block_size']} tokens at a time; the target checks them, so that the output is the target's own. "
        "It is of no use without exactly that target.",
        _table(
            ("", ""),
            [
                ("backbone", f"{config['num_hidden_layers']} layers, hidden size {config['hidden_size']}"),
                ("reads", f"outputs of the target's layers {taps} of {config['num_target_layers']}, counted from 0"),
                ("mask token", config["mask_token_id"]),
                (
                    "sequential head",
                    f"{config['markov_head_type']}, rank {config['markov_rank']}, {confidence} confidence",
                ),
                ("layout, type", f"{record['layout']}, {config['dtype']}"),
                *([("target's fingerprint", f"`{target['fingerprint']}`")] if target.get("fingerprint") else []),
            ],
        ),
        "## Measured",
        _measured(record),
        "## Serving",
        _engines(config, engines),
        "## Trained",
        _training(record),
        f"Every fact above is from `dspark_export.json` and `config.json`. Written by {record['written_by']}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _measured(record: Mapping[str, Any]) -> str:
    lines = []
    for way, measured in (record.get("accepted_length") or {}).items():
        if not isinstance(measured, Mapping):
            continue
        lines.append(
            f"- accepted length, {way}: **{_number(measured.get('tokens_per_iteration'))}** tokens an iteration over "
            f"{measured.get('prompts')} prompts (`{measured.get('command')}`)"
        )
    if not lines:
        lines.append("- accepted length: not measured yet (`megatron-dspark verify --record` measures it)")
    tau = record.get("tau")
    lines.append(
        f"- tau (expected accepted length on held-out data, in training): {_number(tau)}"
        if tau is not None
        else "- tau: not measured"
    )
    return "\n".join(lines)


def _engines(config: Mapping[str, Any], engines: list["EngineVerdict"]) -> str:
    parts = ["TARGET is the target's folder or Hub id, DRAFT this folder."]
    for verdict in engines:
        family = verdict.engine.split("_")[0]
        evidence = "checked by running it" if verdict.executed else "read from its source, not run"
        if not verdict.loads:
            parts.append(f"**{verdict.engine}** will not load it: {'; '.join(verdict.reasons)} ({evidence}).")
            continue
        launch = verdict.launch or ""
        how = _SERVE.get(family, "{launch}").replace("{launch}", launch)
        how = how.replace("{block_size}", str(config["block_size"]))
        parts.append(f"**{verdict.engine}** ({evidence}):\n\n{how}")
    return "\n\n".join(parts)


def _training(record: Mapping[str, Any]) -> str:
    rows: list[tuple[str, Any]] = []
    run, data = record.get("run") or {}, record.get("data") or {}
    if "step" in run:
        rows.append(("optimizer steps", run["step"]))
    if data.get("sha256"):
        rows.append(("data", f"{data.get('file')}, SHA-256 `{data['sha256']}`"))
    conventions = record.get("conventions") or {}
    rows += [(words, conventions[key]) for key, words in _CONVENTIONS if key in conventions]
    imported = record.get("imported")
    if imported:
        rows.append(("converted from", f"{imported['folder']} ({imported['layout']} layout)"))
    block = record.get("block_layout") or {}
    rows += [(f"block: {key}", value) for key, value in block.items()]
    return _table(("", ""), rows)


def _table(head: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {value} |" for key, value in rows)])


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "not measured"
