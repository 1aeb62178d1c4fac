"""Read an export in the speculators layout with the speculators library itself: its config, and its model's tensors.

    pip install speculators==0.8.1
    python examples/engines/check_speculators.py DRAFT

The model is built on the meta device, so that nothing is downloaded and no target is needed.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel

# The target's, which speculators loads from the target.
NOT_IN_FILES = {"verifier_lm_head.weight", "verifier_norm.weight"}


def main() -> None:
    """Print what the library read; exit with an error when a name or a shape differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    folder = parser.parse_args().draft
    config = DSparkSpeculatorConfig.from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in DSparkDraftModel(config).state_dict().items()}
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    wanted = {name: shape for name, shape in wanted.items() if name not in NOT_IN_FILES}
    print(f"taps from 1: {config.aux_hidden_state_layer_ids}, sample_from_anchor: {config.sample_from_anchor}")
    print(f"{len(found)} tensors in the folder, {len(wanted)} in the library's model")
    differing = {name for name in {*found, *wanted} if found.get(name) != wanted.get(name)}
    if differing:
        raise SystemExit(f"these differ: {', '.join(sorted(differing))}")


if __name__ == "__main__":
    main()
