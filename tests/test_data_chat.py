"""Conversations to ids and mask: the mask is on for what the target emitted, and for nothing else."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dspark.data import chat
from megatron_dspark.data.chat import (
    ChatSample,
    encode_messages,
    encode_prompt,
    end_of_turn_token,
    load_tokenizer,
)
from megatron_dspark.data.encoded import load_samples
from megatron_dspark.data.messages import read_messages
from megatron_dspark.errors import DSparkError
from tests.data_support import CHATML, DEFAULT_SYSTEM, TAGGED, THINKING, byte_tokenizer, save_tiny_target
from tests.smollm2_support import smollm2_folder

TWO_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]


def marked(tokenizer: Any, sample: ChatSample) -> str:
    """The sample's text with the learned stretches in ⟦ ⟧."""
    pieces, on = [], False
    for token, learned in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if learned != on:
            pieces.append("⟦" if learned else "⟧")
            on = learned
        pieces.append(tokenizer.decode([token]))
    return "".join(pieces) + ("⟧" if on else "")


def encode(tokenizer: Any, messages: list[dict[str, str]], max_length: int = 10_000, **keys: Any) -> str:
    return marked(tokenizer, encode_messages(tokenizer, {"id": "x", "messages": messages, **keys}, max_length))


@pytest.mark.parametrize("case", json.loads((Path(__file__).parent / "fixtures/chat/golden.json").read_text())["cases"])
def test_golden_masks(case: dict[str, Any]) -> None:
    """Each case lists its pieces with 1 where the target emitted them: written by hand, from the template's text."""
    if case["tokenizer"] == "smollm2":
        tokenizer = load_tokenizer(smollm2_folder())
    else:
        tokenizer = byte_tokenizer({"chatml": CHATML, "thinking": THINKING}[case["tokenizer"]])
    sample = encode_messages(tokenizer, {"id": "x", **case["record"]}, case.get("max_length", 4096))
    ids, mask = [], []
    for text, learned in case["pieces"]:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        mask += [bool(learned)] * len(piece)
    assert sample.input_ids.tolist() == ids[: case.get("max_length")]
    assert sample.loss_mask.tolist() == mask[: case.get("max_length")]
    assert sample.input_ids.dtype == torch.int64 and sample.loss_mask.dtype == torch.bool
    if "ids" in case:  # the tokens themselves, so that a change of the tokenizer does not go unnoticed
        assert sample.input_ids.tolist() == case["ids"]


def test_default_system_prompt_is_context() -> None:
    text = encode(byte_tokenizer(DEFAULT_SYSTEM), TWO_TURNS)
    assert text.startswith("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert text.count("⟦") == 2 and "⟦Yes?<|im_end|>⟧\n" in text and text.endswith("⟦Ciao<|im_end|>⟧\n")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", ""])
def test_tags_that_end_before_or_after_the_closing_token_give_the_same_mask(end: str) -> None:
    tagged = TAGGED.replace(
        "message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
        f"message['content'] + '{end}' }}}}{{% endgeneration %}}{{{{ '{'<|im_end|>\n'.removeprefix(end)}' }}}}",
    )
    assert tagged.count("endgeneration") == 1
    for keys in ({}, {"finish_reason": "length"}, {"supervise": "last"}):
        expected = encode(byte_tokenizer(CHATML), TWO_TURNS, **keys)
        assert encode(byte_tokenizer(tagged), TWO_TURNS, **keys) == expected


def test_tags_around_the_header_do_not_make_the_header_learned() -> None:
    tagged = TAGGED.replace("{{ '<|im_start|>assistant\n' }}{% generation %}", "{% generation %}{{ header }}").replace(
        "{{ header }}", "{{ '<|im_start|>assistant\n' }}"
    )
    assert encode(byte_tokenizer(tagged), TWO_TURNS[:2]) == encode(byte_tokenizer(CHATML), TWO_TURNS[:2])


text = st.text(st.characters(codec="utf-8", exclude_characters="<\x00"), max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(text, text), min_size=1, max_size=4), st.sampled_from(["stop", "length"]))
def test_learned_tokens_are_the_replies_and_what_precedes_them_is_the_prompt(turns, finish_reason: str) -> None:
    plain, tagged = byte_tokenizer(CHATML), byte_tokenizer(TAGGED)
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    record = {"id": "x", "messages": messages, "finish_reason": finish_reason}
    if finish_reason == "length" and not any(reply for _, reply in turns) and len(turns) == 1:
        with pytest.raises(DSparkError, match="its reply is empty"):
            encode_messages(plain, record, 10_000)
        return
    sample = encode_messages(plain, record, 10_000)
    replies = [reply + "<|im_end|>" for _, reply in turns]
    if finish_reason == "length":
        replies[-1] = turns[-1][1]
    assert plain.decode(sample.input_ids[sample.loss_mask]) == "".join(replies)
    prompt = encode_prompt(plain, {"messages": messages[:-1]})
    assert sample.input_ids[: len(prompt)].tolist() == prompt and not sample.loss_mask[len(prompt) - 1]
    other = encode_messages(tagged, record, 10_000)
    assert torch.equal(other.input_ids, sample.input_ids) and torch.equal(other.loss_mask, sample.loss_mask)


def test_reply_that_a_tokenizer_would_join_to_its_header_begins_after_the_header() -> None:
    """SmolLM2 has one token for two newlines; the target was fed the header's newline alone."""
    tokenizer = load_tokenizer(smollm2_folder())
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nYes"}]
    sample = encode_messages(tokenizer, {"id": "x", "messages": messages}, 100)
    prompt = encode_prompt(tokenizer, {"messages": messages[:1]})
    joined = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert joined[: len(prompt)] != prompt
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "\n\nYes<|im_end|>"


def test_template_that_rewrites_earlier_replies() -> None:
    tokenizer = byte_tokenizer(THINKING)
    with pytest.raises(DSparkError, match=r'message 2: the chat template writes this reply differently.*"supervise"'):
        encode(tokenizer, TWO_TURNS)
    assert encode(tokenizer, TWO_TURNS, supervise="last").endswith("⟦<think>\n\n</think>\n\nCiao<|im_end|>⟧\n")
    quiet = encode(tokenizer, TWO_TURNS, supervise="last", template_options={"enable_thinking": False})
    assert quiet.endswith("<think>\n\n</think>\n\n⟦Ciao<|im_end|>⟧\n")


def test_closing_token_is_the_templates_own() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>", "<|pad|>"))
    assert tokenizer.convert_ids_to_tokens(end_of_turn_token(tokenizer)) == "<|pad|>" != tokenizer.eos_token
    with pytest.raises(DSparkError, match="does not close the assistant's turn with a special token"):
        end_of_turn_token(byte_tokenizer(CHATML.replace("<|im_end|>", "")))


def test_refused_samples_name_their_line(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    good = {"id": "a", "messages": TWO_TURNS}
    bad = {"id": "b", "messages": [{"role": "user", "content": "u" * 50}, {"role": "assistant", "content": "late"}]}
    file.write_text(f"{json.dumps(good)}\n\n{json.dumps(bad)}\n")
    tokenizer = byte_tokenizer()
    first, second = read_messages(file)
    assert encode_messages(tokenizer, first, 40).loss_mask.any()
    with pytest.raises(DSparkError, match=r"chat\.jsonl line 3: .*only its first 40 tokens are kept"):
        encode_messages(tokenizer, second, 40)
    replies_only = "{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(DSparkError, match=r"line 3: all 5 tokens count as the assistant's"):
        encode_messages(byte_tokenizer(replies_only), second, 40)
    second["messages"] = second["messages"][:1]
    with pytest.raises(DSparkError, match=r"line 3 has no assistant message"):
        encode_messages(tokenizer, second, 40)
    second["messages"] = [TWO_TURNS[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    with pytest.raises(DSparkError, match=r"line 3, message 2: the reply holds .* 2 times, expected once"):
        encode_messages(tokenizer, second, 400)
    refusing = byte_tokenizer("{{ raise_exception('no such role here') }}")
    with pytest.raises(DSparkError, match=r"line 3: the target's chat template refuses it \(no such role here\)"):
        encode_messages(refusing, second, 400)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[]", "line 2 holds a list"),
        ('{"id": "b"}', "line 2 has no list of `messages`"),
        ('{"messages": [{"role": "bot", "content": ""}]}', "line 2, message 1: role 'bot' is not one of system"),
        ('{"messages": [{"role": "user", "content": null}]}', "line 2, message 1: content is None"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2 does not begin with a user message"),
        (
            '{"id": 3, "messages": [{"role": "user", "content": "a"}]}',
            "line 2: id is 3, expected text that is not empty",
        ),
        pytest.param('{"a": ' + "[" * 100_000, "line 2 is JSON that cannot be read", id="deep"),
        pytest.param('{"a": ' + "1" * 5000 + "}", "line 2 is JSON that cannot be read", id="a large number"),
        (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "half of a surrogate pair"),
        ('{"finish_reason": "eos", "messages": [{"role": "user", "content": "a"}]}', "finish_reason is 'eos'"),
        ('{"id": "a", "messages": [{"role": "user", "content": "a"}]}', "the id 'a' on line 1 and again on line 2"),
    ],
)
def test_every_bad_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(f'{{"id": "a", "messages": [{{"role": "user", "content": "a"}}]}}\n{line}\n')
    with pytest.raises(DSparkError, match=sentence) as caught:
        read_messages(file)
    assert str(file) in str(caught.value)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="there is no such file"):
        read_messages(tmp_path / "none.jsonl")
    with pytest.raises(DSparkError, match="cannot be read"):
        read_messages(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DSparkError, match="holds no conversation"):
        read_messages(tmp_path / "empty.jsonl")


def metaspace_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """SentencePiece's way: spaces belong to the following word, and one may be put before the text."""
    letters = [*string.ascii_letters, *string.punctuation, *string.digits, "▁", "\n"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁a", "b"), ("\n", "\n"), ("\n", "a")]
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = [AddedToken(token, special=True, normalized=False) for token in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


@pytest.mark.parametrize("kind", ["smollm2", "always", "first", "never"])
@given(contents=st.lists(st.text("ab \n.'", max_size=8), min_size=2, max_size=12))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_tokenising_from_the_last_special_token_is_tokenising_the_whole_prefix(kind: str, contents: list[str]) -> None:
    tokenizer = load_tokenizer(smollm2_folder()) if kind == "smollm2" else metaspace_tokenizer(kind)
    text = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    ids, restarts = chat._tokenise_with_restarts(tokenizer, text)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(restarts) == 2 * len(contents)
    for stop in range(0, len(text) + 1, 7 if kind == "smollm2" else 1):
        known, start = chat._last_restart(restarts, stop)
        whole = tokenizer(text[:stop], add_special_tokens=False)["input_ids"]
        assert ids[:known] + tokenizer(text[start:stop], add_special_tokens=False)["input_ids"] == whole


def test_a_line_without_id_gets_one_that_does_not_depend_on_its_place(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": word}]}) for word in ("a", "b")]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    (tmp_path / "two.jsonl").write_text("\n".join(reversed(lines)))
    one, two = read_messages(tmp_path / "one.jsonl"), read_messages(tmp_path / "two.jsonl")
    assert [record["id"] for record in one] == [record["id"] for record in reversed(two)]
    assert len({record["id"] for record in one}) == 2


def test_folder_without_tokenizer_template_or_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DSparkError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(tmp_path)
    folder = save_tiny_target(tmp_path / "target")
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"id": "a", "messages": TWO_TURNS}))
    assert [sample.sample_id for sample in load_samples(file, folder, 200)] == ["a"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(DSparkError, match="gives token id 257 and the model's vocab_size is 100"):
        load_samples(file, folder, 200)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DSparkError, match="has no chat template"):
        load_tokenizer(folder)
