"""README's library example runs as it is printed, with another target."""

import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def test_library_example_builds_the_draft_and_its_target() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    target = ROOT / "examples/tiny_target/model"
    text = code.group(1).replace("path/to/Qwen3-4B", str(target)).replace("151669", "0")
    assert str(target) in text and "mask_token_id=0" in text
    names: dict[str, Any] = {}
    exec(text, names)
    model, config = names["models"][0].module, names["config"]
    assert config.target_path == str(target) and config.num_target_layers == len(model.target.model.decoder.layers)
    ours, theirs = model.draft.embed_tokens.weight, model.target.model.embedding.word_embeddings.weight
    assert torch.equal(ours[: config.vocab_size], theirs[: config.vocab_size])
    assert any(parameter.requires_grad for parameter in model.draft.parameters())
