"""Token-for-token replay of a reference decode, greedy and sampled, with every intermediate it recorded, in FP64."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dspark.sampling import SamplingSettings
from megatron_dspark.serving.target import Target
from megatron_dspark.serving.verify import Block, Session, generate
from tests.serving_support import ListedUniforms, double_precision, golden_draft, tiny_model

TOLERANCE = 1e-12


@pytest.mark.parametrize(("run", "temperature"), [("greedy", 0.0), ("sample_t1", 1.0)])
def test_golden_decode(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, temperature: float
) -> None:
    golden = load_file(fixtures / "golden" / "inference.safetensors")
    model = tiny_model(
        "qwen3", hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=128, rms_norm_eps=1e-6, eos_token_id=None
    )
    weights = {name.removeprefix("target/w/"): t for name, t in golden.items() if name.startswith("target/w/")}
    model.load_state_dict(weights)
    target = Target(double_precision(model))
    draft = golden_draft(golden, tmp_path, head="vanilla", prefix="draft_vanilla/w/")
    recorded = {
        name.removeprefix(f"vanilla/{run}/f64/"): tensor
        for name, tensor in golden.items()
        if name.startswith(f"vanilla/{run}/f64/")
    }
    prompt = golden["prompt"][0].tolist()
    # The recorded run drew its acceptance numbers even when greedy; a greedy request of ours needs none.
    uniforms = ListedUniforms([] if temperature == 0 else recorded["uniform_stream_used"].tolist())
    appended: list[torch.Tensor] = []
    extend = draft.extend_context
    monkeypatch.setattr(draft, "extend_context", lambda context, rows: (appended.append(rows), extend(context, rows)))
    compared = []

    def check(session: Session, block: Block) -> None:
        number = len(compared)
        record = {
            name.removeprefix(f"iter{number}/"): t for name, t in recorded.items() if name.startswith(f"iter{number}/")
        }
        compared.append(block.record)
        if not record:  # the reference kept every tensor of its first iterations only
            return
        assert block.start == int(record["start"])
        assert block.anchor == int(record["draft_input_ids"][0, 0])
        assert block.proposal.tokens == record["sampled_tokens"][0].tolist()
        assert block.tokens == record["committed"][0].tolist()
        assert block.record.accepted == int(record["accepted"])
        pairs = {
            "context_hidden_new": appended[number],
            "block_hidden": block.proposal.hidden,
            "base_logits": block.proposal.base_logits,
            "draft_logits": block.proposal.logits,
            "confidence_logits": block.proposal.confidence,
            "p": block.target_probabilities,
            "q": block.draft_probabilities,
        }
        for name, value in pairs.items():
            if value is not None:
                torch.testing.assert_close(value, record[name][0], atol=TOLERANCE, rtol=0)
        if temperature == 0:
            assert block.target_logits.argmax(-1).tolist() == record["p"][0].argmax(-1).tolist()

    result = generate(
        target,
        draft,
        prompt,
        settings=SamplingSettings(temperature),
        max_new_tokens=recorded["output_ids"].shape[1] - len(prompt),
        uniforms=uniforms,
        observe=check,
    )
    assert [*prompt, *result.token_ids] == recorded["output_ids"][0].tolist()
    assert [block.accepted for block in compared] == recorded["accepted_draft_lengths"].tolist()
    assert [block.committed for block in compared] == recorded["acceptance_lengths"].tolist()
    assert [block.width for block in compared] == recorded["proposal_lengths"].tolist()
    assert uniforms.used == len(uniforms.values), "the request must consume exactly the recorded random numbers"
