"""The measurement itself: its counts add up, its verdict can be negative, and it refuses what it cannot measure."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_dspark.data.chat import encode_messages, encode_prompt
from megatron_dspark.errors import DSparkError
from megatron_dspark.serving import target as target_module
from megatron_dspark.serving import verify as verify_module
from megatron_dspark.serving.harness import _threads, _tokenize, verify_drafter
from megatron_dspark.serving.report import VerifyReport
from tests.data_support import CHATML, DEFAULT_SYSTEM, TAGGED, THINKING, byte_tokenizer
from tests.serving_support import save_agreeing_draft, save_target, tiny_model


def prompts(count: int = 3) -> list[dict[str, Any]]:
    return [
        {"id": f"prompt-{number}", "messages": [{"role": "user", "content": f"w{20 + number} w{40 + number} w9"}]}
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft that is sometimes right, and its target."""
    folder = tmp_path_factory.mktemp("harness")
    model = tiny_model("llama", context=0.01, seed=6)
    return save_agreeing_draft(model, folder / "draft", noise=0.03), save_target(folder / "target", model)


def run(folders: tuple[Path, Path], **changes: Any) -> VerifyReport:
    return verify_drafter(*folders, prompts(), **({"max_new_tokens": 30} | changes))


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, TAGGED, THINKING], ids=range(4))
@pytest.mark.parametrize("options", [None, {}, {"enable_thinking": False}, {"enable_thinking": True}], ids=str)
def test_the_prompt_served_is_the_prompt_trained_on(template: str, options: dict[str, Any] | None) -> None:
    tokenizer = byte_tokenizer(template)
    record: dict[str, Any] = {"id": "a", "messages": [{"role": "user", "content": "Hi"}]}
    if options is not None:
        record["template_options"] = options
    target = SimpleNamespace(max_positions=1000, vocab_size=1000)
    (served,) = _tokenize([record], tokenizer, target)
    assert served.ids == encode_prompt(tokenizer, record)
    reply = {**record, "messages": [*record["messages"], {"role": "assistant", "content": "Ciao"}]}
    trained = encode_messages(tokenizer, reply, 1000)
    thought_is_given = template == THINKING and options == {"enable_thinking": False}
    if template != THINKING or thought_is_given:
        assert trained.input_ids[: int(trained.loss_mask.int().argmax())].tolist() == served.ids
    assert thought_is_given == ("<think>" in tokenizer.decode(served.ids))


def rendered(report: VerifyReport) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.render())
    return console.export_text()


def test_greedy_report_adds_up(folders: tuple[Path, Path]) -> None:
    report = run(folders, threads=1)
    assert report.exact is True
    assert report.exactness.prompts_equal == 3 and report.exactness.tokens_different == 0
    assert report.exactness.tokens_compared == report.new_tokens == report.new_tokens_target_only
    assert report.proposals == 4 * report.iterations
    assert sum(slot.accepted for slot in report.slots) == report.proposals_accepted
    assert report.slots[0].judged == report.iterations
    for before, after in zip(report.slots, report.slots[1:], strict=False):
        assert after.judged <= before.accepted, "a slot is judged only when the one before was accepted"
    for slot in report.slots:
        assert slot.survival == slot.accepted / report.iterations
        assert slot.rate is None or slot.rate == slot.accepted / slot.judged
        assert slot.confidence is None or 0 < slot.confidence < 1
    assert report.slots[0].confidence is not None
    assert sum(report.finish_reasons.values()) == 3
    # Nothing here ends at a stop token, so every block commits what was accepted and one token more.
    assert report.finish_reasons == {"length": 3}
    assert report.accepted_length == pytest.approx(1 + report.proposals_accepted / report.iterations)
    assert report.speedup == pytest.approx(report.tokens_per_second / report.tokens_per_second_target_only)
    parsed = json.loads(json.dumps(report.as_dict()))
    assert parsed["exact"] is True and parsed["slots"][0]["judged"] == report.iterations
    text = rendered(report)
    assert "3 of 3 prompts" in text and "greedy" in text


def test_sampled_report_says_that_equality_does_not_apply(folders: tuple[Path, Path]) -> None:
    report = run(folders, temperature=0.7, top_p=0.9, seed=5)
    assert report.exact is None and not report.exactness.applies
    assert report.as_dict()["exact"] is None
    assert "does not apply" in rendered(report)
    again = run(folders, temperature=0.7, top_p=0.9, seed=5)
    other = run(folders, temperature=0.7, top_p=0.9, seed=6)
    counts = [(r.iterations, r.proposals_accepted, r.new_tokens) for r in (report, again, other)]
    assert counts[0] == counts[1] != counts[2]


def test_one_prompt_gives_the_same_alone_and_among_others(folders: tuple[Path, Path]) -> None:
    settings = {"max_new_tokens": 30, "temperature": 1.0, "seed": 4}
    every = verify_drafter(*folders, prompts(3), **settings)
    single = [verify_drafter(*folders, [prompt], **settings) for prompt in reversed(prompts(3))]
    assert every.iterations == sum(report.iterations for report in single)
    assert every.proposals_accepted == sum(report.proposals_accepted for report in single)


def test_a_wrong_verifier_is_reported(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that accepts whatever is proposed gives other tokens, and rounding does not explain them."""
    monkeypatch.setattr(verify_module, "verify_greedy", lambda choices, tokens: (len(tokens), choices[-1]))
    report = run(folders)
    assert report.exact is False
    assert report.exactness.prompts_equal < 3 and report.exactness.tokens_different > 0
    for mismatch in report.exactness.mismatches:
        assert not mismatch.explained_by_rounding
        assert mismatch.drafted != mismatch.target_only
        assert mismatch.top2_gap > 1e-3
    assert "NO" in rendered(report)


def test_a_near_tie_is_explained(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where block arithmetic differs from single-row arithmetic, mismatches are found and put down to rounding."""

    def coarse_blocks(self: Any, tokens: list[int], cache: Any, *, logit_rows: int | None = None) -> Any:
        rows = forward(self, tokens, cache, logit_rows=logit_rows)
        if cache.length > len(tokens) > 1:  # a block behind a context
            rows.logits = (rows.logits / 4).round() * 4
        return rows

    forward = target_module.Target.forward
    monkeypatch.setattr(target_module.Target, "forward", coarse_blocks)
    report = run(folders)
    assert report.exact is False
    assert all(mismatch.explained_by_rounding for mismatch in report.exactness.mismatches)
    assert all(mismatch.rounding > 0.1 for mismatch in report.exactness.mismatches)
    assert "within rounding" in rendered(report)


def test_bfloat16_runs_and_every_mismatch_is_rounding(folders: tuple[Path, Path]) -> None:
    report = run(folders, dtype="bfloat16")
    assert report.dtype == "bfloat16" and report.exactness.applies
    assert all(mismatch.explained_by_rounding for mismatch in report.exactness.mismatches)


def test_the_thread_count_is_put_back() -> None:
    before = torch.get_num_threads()
    with _threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], "no prompts"),
        ([{"messages": [{"role": "user", "content": "w9"}]}], "prompt 1 has the id None"),
        (prompts(1) * 2, "two prompts have the id 'prompt-0'"),
        ([{"id": "a", "messages": []}], "'a' has no list of messages"),
        ([{"id": "a", "messages": [{"role": "user"}]}], "'a' has no list of messages"),
        ([{"id": "a", "messages": [{"role": "system", "content": "w9"}, *prompts(1)[0]["messages"]]}], "no systems"),
        (
            [{"id": "a", "messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w8"}]}],
            "'a' ends with the role 'assistant'",
        ),
        ([{"id": "a", "messages": [{"role": "user", "content": "w9 " * 300}]}], "and the target 256 positions"),
    ],
)
def test_prompts_that_cannot_be_run_are_refused(
    folders: tuple[Path, Path], bad: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(DSparkError, match=words):
        verify_drafter(*folders, bad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"device": "gpu0"}, "device 'gpu0'"),
        ({"threads": 0}, "threads is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(
    folders: tuple[Path, Path], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(DSparkError, match=words):
        run(folders, **change)
