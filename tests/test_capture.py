"""Colocated capture: taps and teacher are the target's own, and what a block sees is what it may see."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from megatron_dspark.builder import DSparkModelBuilder
from megatron_dspark.errors import DSparkError
from megatron_dspark.model.model import DSparkModel
from tests.megatron import process_groups, tiny_config


def save_target(folder: Path, kind: str, **changes: object) -> PreTrainedModel:
    shape: dict = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=131,
        max_position_embeddings=256,
        tie_word_embeddings=kind == "llama",
    )
    shape.update(changes)
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        # A final norm far from ones: reading the state on its wrong side cannot go unnoticed.
        model.model.norm.weight.uniform_(-2, 3)
        model.get_output_embeddings().weight.normal_(std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def colocated(folder: Path, **settings: object) -> DSparkModel:
    groups = process_groups()
    config = tiny_config(
        dtype=torch.float32, vocab_size=131, make_vocab_size_divisible_by=64, target_path=str(folder), **settings
    )
    return DSparkModelBuilder(config).build_model(groups)


@pytest.mark.parametrize("kind", ("llama", "qwen3"))
def test_taps_and_teacher_equal_the_targets_own(kind: str, tmp_path: Path) -> None:
    reference = save_target(tmp_path, kind)
    model = colocated(tmp_path, target_layer_ids=[-1, 1, 4, 7], allow_unservable_taps=True)
    ids = torch.randint(0, 131, (2, 33), generator=torch.Generator().manual_seed(1))
    layers: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: layers.append(output))
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    features = model.target.capture(ids)
    outputs = [expected.hidden_states[0], layers[1], layers[4], layers[7]]
    torch.testing.assert_close(features.taps.transpose(0, 1), torch.cat(outputs, -1), rtol=1e-4, atol=2e-5)
    logits = features.final_hidden.transpose(0, 1) @ model.draft.teacher_head_weight[:131].T
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert features.taps.requires_grad is False and not any(p.requires_grad for p in model.target.parameters())


def test_no_target_logits_and_no_target_in_checkpoints(tmp_path: Path) -> None:
    save_target(tmp_path, "qwen3")
    model = colocated(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("the target's LM head ran")

    model.target.model.output_layer.register_forward_pre_hook(refuse)
    model.target.capture(torch.zeros(1, 4, dtype=torch.int64))
    assert all(name.startswith("draft.") for name in model.state_dict())
    assert all(name.startswith("draft.") for name in model.sharded_state_dict())
    assert torch.equal(model.draft.embed_tokens.weight[131:], torch.zeros(192 - 131, 64))


def test_draft_equal_to_its_teacher_accepts_everything(tmp_path: Path) -> None:
    save_target(tmp_path, "qwen3")
    model = colocated(tmp_path, enable_confidence_head=False, confidence_loss_weight=0.0)
    ids = torch.randint(0, 131, (2, 40), generator=torch.Generator().manual_seed(2))
    loss_mask = torch.ones(2, 40, dtype=torch.bool)
    anchors = torch.tensor([[3, 20], [7, 30]])
    features = model.target.capture(ids)
    model.draft.markov_head.markov_w2.weight.data.zero_()
    original = model.draft.supervised_rows

    def copy_teacher(layout: object, hidden: torch.Tensor, final_hidden: torch.Tensor) -> object:
        rows = original(layout, hidden, final_hidden)
        rows.hidden = rows.teacher_hidden.clone()
        return rows

    model.draft.supervised_rows = copy_teacher
    _, _, report = model(ids, loss_mask, anchors, features.taps, features.final_hidden)
    assert float(report["l1_loss"][0]) == 0.0
    assert float(report["tau"][0] / report["tau"][1]) == model.dspark_config.block_size + 1


def test_target_that_does_not_belong_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path, "qwen3", vocab_size=140)
    with pytest.raises(DSparkError, match=r"vocab_size is 131 .* has 140"):
        colocated(tmp_path)
    save_target(tmp_path / "odd", "qwen3", intermediate_size=97)
    with pytest.raises(DSparkError, match="intermediate_size 97, which tensor_model_parallel_size 2 does not divide"):
        colocated(tmp_path / "odd", transformer={"tensor_model_parallel_size": 2})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DSparkError, match="not valid JSON"):
        colocated(tmp_path)
    with pytest.raises(DSparkError, match="does not exist"):
        colocated(tmp_path / "nowhere")


def test_positions_restart_in_every_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention tells only distances apart, so no result shows it but in low precision; engines count from 0."""
    from megatron_dspark.model import draft as draft_module

    save_target(tmp_path, "qwen3")
    model = colocated(tmp_path)
    documents = torch.tensor([[0] * 20 + [1] * 12 + [-1]])
    ids, loss_mask = torch.zeros_like(documents), documents >= 0
    angles: list[torch.Tensor] = []
    model.target.model.rotary_pos_emb.register_forward_hook(lambda *call: angles.append(call[-1]))
    rotary_tables, asked = draft_module.rotary_tables, []
    monkeypatch.setattr(
        draft_module, "rotary_tables", lambda rows, *rest: (asked.append(rows), rotary_tables(rows, *rest))[1]
    )
    model(ids, loss_mask, torch.tensor([[4, 25, 30]]), documents=documents)
    assert torch.equal(angles[0][20:32], angles[0][:12]) and not torch.equal(angles[0][8:20], angles[0][:12])
    context, slots = sorted(asked, key=lambda rows: rows.shape[1] != 30)
    assert context[0].tolist() == [*range(20), *range(10)]
    assert slots[0].tolist() == [anchor + slot for anchor in (4, 5, 10) for slot in range(5)]
