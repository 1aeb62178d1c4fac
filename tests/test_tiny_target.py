"""The tiny target kept with the project: a loadable folder, answers that are its own, and a script that works."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.tiny_target.dishes import dishes
from examples.tiny_target.recipe_text import draw_answers, draw_request, is_held_out, is_possible
from megatron_dspark.data.chat import encode_messages, encode_prompt
from megatron_dspark.data.messages import read_messages
from megatron_dspark.targets.folder import read_target_config
from tests.distributed import RankPool

REPOSITORY = Path(__file__).parent.parent
EXAMPLE = REPOSITORY / "examples" / "tiny_target"
MODEL, DATA = EXAMPLE / "model", EXAMPLE / "data"


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def conversations() -> dict[str, list[Any]]:
    return {name: read_messages(DATA / f"{name}.jsonl") for name in ("train", "heldout")}


def test_shape_allows_two_and_four_tensor_parallel_ranks_and_five_taps() -> None:
    config = read_target_config(MODEL)
    assert config.architecture == "Qwen3ForCausalLM"
    assert config.num_attention_heads % 4 == 0 and config.num_key_value_heads % 4 == 0
    assert config.intermediate_size % 4 == 0 and config.hidden_size % 4 == 0 and config.vocab_size % 4 == 0
    assert config.num_attention_heads > config.num_key_value_heads  # grouped queries are exercised
    assert config.vocab_size % 128 != 0  # Megatron-Core has to pad it
    assert len(range(1, config.num_layers - 3 + 1)) >= 5  # taps stand inside [1, N-3]
    assert not config.tie_word_embeddings


def test_weights_are_small_and_bfloat16() -> None:
    files = list(MODEL.glob("*.safetensors"))
    with safe_open(files[0], framework="pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 4_000_000
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 300_000


def test_rope_base_is_said_in_both_places() -> None:
    raw = json.loads((MODEL / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 50_000.0
    assert AutoConfig.from_pretrained(MODEL).rope_parameters["rope_theta"] == 50_000.0


def test_every_norm_was_trained(model: Any) -> None:
    norms = {name: weight for name, weight in model.named_parameters() if "norm" in name}
    assert len(norms) == 4 * model.config.num_hidden_layers + 1
    for name, weight in norms.items():
        assert (weight - 1).abs().max() > 0.05, name
    assert (model.model.norm.weight - 1).abs().mean() > 0.1  # far from ones: who forgets it computes another teacher


def test_tokenizer_covers_any_text_with_the_models_rows(tokenizer: Any, model: Any) -> None:
    assert len(tokenizer) == model.config.vocab_size == model.lm_head.weight.shape[0]
    for text in ("Käsespätzle für 4 Personen 🍝\n\ttab", "simple carrot soup", "\x00\x7f", "  leading spaces"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_chat_template_is_chatml(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n") and text.startswith(prompt)


def test_no_text_holds_the_mask_token(tokenizer: Any, conversations: dict[str, list[Any]]) -> None:
    mask = tokenizer.convert_tokens_to_ids("<|mask|>")
    assert mask == tokenizer.mask_token_id
    assert mask not in (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    used = {int(i) for r in _all(conversations) for i in encode_messages(tokenizer, r, 2048).input_ids}
    assert mask not in used and tokenizer.pad_token_id not in used


def test_data_is_in_the_messages_format_and_disjoint(conversations: dict[str, list[Any]]) -> None:
    assert (len(conversations["train"]), len(conversations["heldout"])) == (160, 24)
    records = _all(conversations)
    assert len({record["id"] for record in records}) == len(records)
    for record in records:
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert record["domain"] == "recipes" and record["finish_reason"] == "stop"
    questions = {name: {record["messages"][0]["content"] for record in part} for name, part in conversations.items()}
    assert not questions["train"] & questions["heldout"]
    # No dish that is asked for in the one file is asked for in the other.
    for name, part in questions.items():
        for question in part:
            asked = [dish for dish in dishes() if f" {dish[0].name} {dish[1].name}" in question]
            assert len(asked) == 1 and is_held_out(*asked[0]) == (name == "heldout"), question
    assert any(len(record["messages"]) > 2 for record in conversations["heldout"])  # also second turns


@torch.no_grad()
def test_every_stored_token_is_the_targets_first_choice(
    model: Any, tokenizer: Any, conversations: dict[str, list[Any]]
) -> None:
    """Every answer is the model's own greedy one, `<|im_end|>` included, with room for another machine's rounding."""
    closings = 0
    for record in _all(conversations):
        sample = encode_messages(tokenizer, record, 2048)
        logits = model(sample.input_ids[None]).logits[0, :-1]
        labels, answered = sample.input_ids[1:], sample.loss_mask[1:]
        best_two = logits[answered].topk(2, dim=-1)
        assert torch.equal(best_two.indices[:, 0], labels[answered]), record["id"]
        assert (best_two.values[:, 0] - best_two.values[:, 1]).min() > 5e-4, record["id"]
        closings += int((labels[answered] == tokenizer.eos_token_id).sum())
    assert closings == sum(len(record["messages"]) // 2 for record in _all(conversations))


def test_greedy_generation_gives_the_stored_answer(
    model: Any, tokenizer: Any, conversations: dict[str, list[Any]]
) -> None:
    for record in conversations["heldout"][:4]:
        prompt = encode_prompt(tokenizer, {**record, "messages": record["messages"][:1]})
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=300, do_sample=False
        )
        answer = output[0, len(prompt) :].tolist()
        assert answer[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(answer[:-1]) == record["messages"][1]["content"]


@torch.no_grad()
def test_megatron_on_two_ranks_computes_the_same_logits(
    model: Any, tokenizer: Any, conversations: dict[str, list[Any]], two_ranks: RankPool
) -> None:
    ids = encode_messages(tokenizer, conversations["heldout"][0], 2048).input_ids
    expected = model(ids[None]).logits[0]
    for shards in two_ranks.run(megatron_logits, ids.tolist()):
        assert shards.shape[0] == len(ids)
        torch.testing.assert_close(torch.from_numpy(shards)[:, :1000], expected, rtol=1e-5, atol=1e-4)


def megatron_logits(rank: int, world_size: int, ids: list[int]) -> Any:
    """On one of `world_size` tensor-parallel ranks: the kept model's logits of `ids`, gathered, [S, V padded]."""
    from megatron_dspark.features.colocated import load_target
    from tests.megatron import process_groups, tiny_config

    groups = process_groups(tensor_parallel_size=world_size)
    transformer = tiny_config(tensor_parallel_size=world_size, dtype=torch.float32).transformer
    (target,) = load_target(MODEL, [1, 2, 3, 4, 5], transformer, groups)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = target.model(tokens, torch.arange(len(ids))[None], None)
    shards = [torch.empty_like(logits) for _ in range(world_size)]
    torch.distributed.all_gather(shards, logits.contiguous(), group=groups.tp)
    return torch.cat(shards, dim=-1)[0].numpy()


def test_grammar_knows_its_own_answers_and_no_others() -> None:
    rng = random.Random(1)
    for _ in range(300):
        request = draw_request(rng)
        answers = [message["content"] for message in draw_answers(rng, request) if message["role"] == "assistant"]
        for lines, answer in zip(request.answers, answers, strict=True):
            assert is_possible(lines, answer)
            assert not is_possible(lines, answer + "\n") and not is_possible(lines, answer.replace(".", "!"))
    assert not any(is_held_out(r.main, r.form) for r in (draw_request(rng, held_out=False) for _ in range(500)))
    assert all(is_held_out(r.main, r.form) for r in (draw_request(rng, held_out=True) for _ in range(100)))


def test_the_script_runs_from_the_repositorys_root_and_makes_the_kept_tokenizer(tmp_path: Path) -> None:
    small = ["--steps", "2", "--train-conversations", "1", "--heldout-conversations", "1"]
    done = _train("--output", str(tmp_path / "out"), *small)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 2 and report["least_possible_answer_loss"] < report["answer_loss"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data", "model"]
    made = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert made == {path.name for path in MODEL.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "out" / "model" / name).read_bytes() == (MODEL / name).read_bytes(), name


def test_the_script_refuses_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = _train("--output", str(tmp_path))
    assert done.returncode == 2 and "already exists; choose another --output" in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _all(conversations: dict[str, list[Any]]) -> list[Any]:
    return conversations["train"] + conversations["heldout"]


def _train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.tiny_target.train", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
