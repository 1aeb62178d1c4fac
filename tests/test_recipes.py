"""The Qwen3 recipe asks for the released drafters, whatever their size."""

import json
from pathlib import Path

import pytest

from megatron_dspark.hf.config import draft_hf_config, settings_from_model
from megatron_dspark.targets.folder import TargetConfig
from megatron_dspark.training.overrides import override
from megatron_dspark.training.recipes import load_recipe
from tests.test_hf_layouts import PUBLISHED

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("name", PUBLISHED)
def test_qwen3_recipe_gives_the_released_drafters(fixtures: Path, name: str, tensor: int) -> None:
    instance = json.loads((fixtures / "dense_qwen3_dspark.json").read_text())["instances"][name]["config"]
    target = TargetConfig(
        folder=Path(name),
        architecture="Qwen3ForCausalLM",
        num_layers=instance["num_target_layers"],
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        raw={},
        **{
            key: instance[key]
            for key in (
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "intermediate_size",
                "vocab_size",
            )
        },
    )
    layout = [f"parallel.tensor={tensor}", f"parallel.sequence={tensor > 1}"]
    changes = ["output=run", f"target={name}", "data=x", *layout]
    settings = override(load_recipe(f"{ROOT}/recipes/qwen3.py:dense"), changes)
    settings.validate()
    config = settings.model_config(target)
    config.validate(world_size=8)
    shape = {**instance, "num_hidden_layers": target.num_layers, "max_position_embeddings": 40960}
    exported = draft_hf_config(shape, settings_from_model(config))
    assert {key: exported[key] for key in instance} == instance
