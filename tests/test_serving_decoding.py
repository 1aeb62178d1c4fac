"""The draft/verify loop on real transformers targets: same tokens as the target alone, and state that rolls back."""

import math
from pathlib import Path

import pytest
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.sampling import SamplingSettings, UniformStream
from megatron_dspark.serving.draft import DraftModel
from megatron_dspark.serving.target import Target
from megatron_dspark.serving.verify import Generation, Session, generate, generate_target_only
from tests.serving_support import agreeing_draft, double_precision, draft_config, save_draft, tiny_model

GREEDY = SamplingSettings()
SAMPLED = SamplingSettings(temperature=0.7, top_k=40, top_p=0.95)
PROMPT = [5, 17, 33, 2, 41, 8, 60]


def random_draft(folder: Path, dtype: torch.dtype = torch.float32, **changes: object) -> DraftModel:
    return DraftModel.load(save_draft(folder, draft_config(**changes)), dtype, torch.device("cpu"))


def both(target: Target, draft: DraftModel, settings: SamplingSettings, length: int) -> tuple[Generation, Generation]:
    requests = {"settings": settings, "max_new_tokens": length}
    drafted = generate(target, draft, PROMPT, uniforms=UniformStream(3, "r"), **requests)
    return drafted, generate_target_only(target, PROMPT, uniforms=UniformStream(3, "r"), **requests)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_greedy_equals_target_only_with_a_random_draft(tmp_path: Path, kind: str, head: str) -> None:
    target = Target(tiny_model(kind, eos_token_id=None))
    drafted, alone = both(target, random_draft(tmp_path / "draft", markov_head_type=head), GREEDY, 40)
    assert drafted.token_ids == alone.token_ids and len(alone.token_ids) == 40
    assert drafted.finish_reason == alone.finish_reason == "length"


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_equals_target_only_with_a_draft_that_agrees(tmp_path: Path, kind: str) -> None:
    """Every block is accepted whole and brings its bonus: γ + 1 tokens an iteration."""
    model = tiny_model(kind, context=0.0)
    target = Target(model)
    drafted, alone = both(target, agreeing_draft(model, tmp_path / "draft"), GREEDY, 41)
    assert drafted.token_ids == alone.token_ids
    assert [block.committed for block in drafted.blocks] == [5] * 8


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_equals_target_only_with_a_draft_that_is_sometimes_right(tmp_path: Path, kind: str) -> None:
    model = tiny_model(kind, context=0.01, seed=6)
    drafted, alone = both(Target(model), agreeing_draft(model, tmp_path / "draft", noise=0.03), GREEDY, 60)
    assert drafted.token_ids == alone.token_ids
    lengths = {block.accepted for block in drafted.blocks}
    assert len(lengths) >= 3, f"this case is meant to mix short and long blocks, and accepted {lengths}"


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_state_after_every_block_equals_a_fresh_prefill(tmp_path: Path, settings: SamplingSettings) -> None:
    """Target KV and draft context hold the committed rows and nothing of a rejected one."""
    model = double_precision(tiny_model("qwen3", context=0.01, seed=6))
    target, draft = Target(model), agreeing_draft(model, tmp_path / "draft", noise=0.03)
    uniforms = UniformStream(1, "r")
    session = Session(target, draft, PROMPT, settings=settings, max_new_tokens=40, uniforms=uniforms)
    session.prefill()
    rejected_blocks = 0
    while not session.finished:
        block = session.step()
        rejected_blocks += block.record.accepted < block.record.width
        if session.finished:
            break
        committed = session.buffer.tokens
        assert session.cache.length == session.context.length == len(committed) - 1
        with torch.inference_mode():
            cache = target.new_cache(len(committed))
            rows = target.forward(committed[:-1], cache)
            context = draft.new_context(len(committed))
            draft.extend_context(context, rows.features(len(committed) - 1))
        for layer in range(target.layers):
            for ours, fresh in zip(session.cache.rows(layer), cache.rows(layer), strict=True):
                torch.testing.assert_close(ours, fresh, atol=1e-11, rtol=0)
        held = session.context
        for ours, fresh in zip((*held.keys, *held.values), (*context.keys, *context.values), strict=True):
            rows = slice(0, len(committed) - 1)
            torch.testing.assert_close(ours[:, :, rows], fresh[:, :, rows], atol=1e-11, rtol=0)
    assert rejected_blocks >= 3


def test_what_lies_behind_the_frontier_is_never_read(tmp_path: Path) -> None:
    """Overwriting every rejected row with NaN between blocks changes no token."""
    model = tiny_model("llama", context=0.01, seed=6)
    target, draft = Target(model), agreeing_draft(model, tmp_path / "draft", noise=0.03)

    @torch.inference_mode()
    def poison(session: Session, _: object) -> None:
        for held in session.cache.layers:
            held.keys[:, :, held.length :] = math.nan
            held.values[:, :, held.length :] = math.nan
        for buffer in (*session.context.keys, *session.context.values):
            buffer[:, :, session.context.length :] = math.nan

    requests = {"settings": GREEDY, "max_new_tokens": 40}
    clean = generate(target, draft, PROMPT, uniforms=UniformStream(0, "r"), **requests)
    poisoned = generate(target, draft, PROMPT, uniforms=UniformStream(0, "r"), observe=poison, **requests)
    assert poisoned.token_ids == clean.token_ids
    assert any(block.accepted < block.width for block in clean.blocks)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_neighbours_do_not_change_a_request(tmp_path: Path, settings: SamplingSettings) -> None:
    """Two requests that take turns on the same models give what each gives alone."""
    model = tiny_model("qwen3", context=0.01, seed=6)
    target, draft = Target(model), agreeing_draft(model, tmp_path / "draft", noise=0.03)
    prompts = {"a": PROMPT, "b": [9, 9, 70]}

    def session(name: str) -> Session:
        uniforms = UniformStream(2, name)
        return Session(target, draft, prompts[name], settings=settings, max_new_tokens=30, uniforms=uniforms)

    alone = {}
    for name in prompts:
        single = session(name)
        single.prefill()
        while not single.finished:
            single.step()
        alone[name] = single.buffer.tokens
    together = {name: session(name) for name in ("b", "a")}
    for one in together.values():
        one.prefill()
    while not all(one.finished for one in together.values()):
        for one in together.values():
            if not one.finished:
                one.step()
    assert {name: one.buffer.tokens for name, one in together.items()} == alone


def test_a_stop_token_inside_a_block_ends_the_response(tmp_path: Path) -> None:
    """Accepted proposals and the bonus behind a stop token are not part of the response, nor of the statistics."""
    model = tiny_model("llama", context=0.0, seed=1)
    draft = agreeing_draft(model, tmp_path / "draft")
    unstopped = both(Target(model), draft, GREEDY, 30)[0].token_ids
    assert unstopped.index(unstopped[3]) == 3, "the third proposal of the first block must be a new token"
    drafted, alone = both(Target(model, stop_ids=[unstopped[3]]), draft, GREEDY, 30)
    assert drafted.token_ids == alone.token_ids == unstopped[:4]
    assert drafted.finish_reason == alone.finish_reason == "stop"
    (block,) = drafted.blocks
    assert (block.width, block.accepted, block.judged, block.committed) == (4, 3, 3, 3)


def test_a_stop_token_as_first_token(tmp_path: Path) -> None:
    model = tiny_model("llama", context=0.0, seed=1)
    draft = agreeing_draft(model, tmp_path / "draft")
    first = both(Target(model), draft, GREEDY, 1)[0].token_ids[0]
    drafted, alone = both(Target(model, stop_ids=[first]), draft, GREEDY, 30)
    assert drafted.token_ids == alone.token_ids == [first]
    assert drafted.finish_reason == "stop" and drafted.blocks == []


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7])
def test_the_response_has_exactly_the_length_asked_for(tmp_path: Path, length: int) -> None:
    """With whole blocks accepted, γ + 1 = 5 tokens come at once; the last block is cut, and counts in full."""
    model = tiny_model("qwen3", context=0.0)
    drafted, alone = both(Target(model), agreeing_draft(model, tmp_path / "draft"), GREEDY, length)
    assert drafted.token_ids == alone.token_ids and len(drafted.token_ids) == length
    assert [block.committed for block in drafted.blocks] == [5] * math.ceil((length - 1) / 5)


@pytest.mark.parametrize("positions", [8, 9, 12, 20])
def test_the_targets_positions_end_the_response(tmp_path: Path, positions: int) -> None:
    """Blocks narrow towards the end: no row is fed beyond the last position, and the tokens stay the target's."""
    model = tiny_model("llama", context=0.01, seed=6, max_position_embeddings=positions)
    target, draft = Target(model), agreeing_draft(model, tmp_path / "draft", noise=0.03)
    drafted, alone = both(target, draft, GREEDY, 100)
    assert drafted.token_ids == alone.token_ids and len(alone.token_ids) == positions - len(PROMPT)
    assert drafted.finish_reason == alone.finish_reason == "context"


def test_the_embedding_and_the_last_layer_can_be_tapped() -> None:
    """Tap i is the output of decoder layer i before any final norm, -1 the embedding."""
    model = tiny_model("qwen3")
    target = Target(model)
    target.capture([-1, 0, 2, 3])
    with torch.inference_mode():
        rows = target.forward(PROMPT, target.new_cache(16))
        reference = model(torch.tensor([PROMPT]), output_hidden_states=True)
    for tap, hidden in zip((-1, 0, 2), rows.taps[:3], strict=True):
        torch.testing.assert_close(hidden, reference.hidden_states[tap + 1][0])
    torch.testing.assert_close(model.model.norm(rows.taps[3]), reference.hidden_states[4][0])
    torch.testing.assert_close(rows.logits, reference.logits[0])
    torch.testing.assert_close(rows.features(3), torch.cat([tap[:3] for tap in rows.taps], -1))


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    target, draft = Target(tiny_model("llama", max_position_embeddings=7)), random_draft(tmp_path / "draft")
    with pytest.raises(DSparkError, match="7 tokens and the target 7 positions"):
        generate(target, draft, PROMPT, settings=GREEDY, max_new_tokens=4, uniforms=UniformStream(0, "r"))
    with pytest.raises(DSparkError, match="max_new_tokens is 0"):
        generate(target, draft, [1], settings=GREEDY, max_new_tokens=0, uniforms=UniformStream(0, "r"))
    with pytest.raises(DSparkError, match="no tokens"):
        generate(target, draft, [], settings=GREEDY, max_new_tokens=4, uniforms=UniformStream(0, "r"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 97}, "vocab_size 97 and this target has 96"),
        ({"hidden_size": 40}, "hidden_size 40 and this target has 32"),
        ({"num_target_layers": 5}, "num_target_layers 5 and this target has 4"),
    ],
)
def test_a_draft_for_another_target_is_refused(tmp_path: Path, change: dict[str, int], words: str) -> None:
    target, draft = Target(tiny_model("llama")), random_draft(tmp_path / "draft", **change)
    with pytest.raises(DSparkError, match=words):
        generate(target, draft, PROMPT, settings=GREEDY, max_new_tokens=4, uniforms=UniformStream(0, "r"))
