"""What was trained is what is served: a Megatron draft, exported, gives the same logits in the verifier's own code.

The two implementations share nothing but the exported folder. The numbers are compared in FP64 on weights that FP32
holds exactly, so the export is lossless.
"""

from pathlib import Path

import pytest
import torch

from megatron_dspark.serving.draft import DraftModel
from tests.serving_support import scripted
from tests.test_hf_round_trip import VARIANTS, build, export

SAMPLES, LENGTH, VOCABULARY = 2, 20, 128


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_supervised_slot(tmp_path: Path, variant: str) -> None:
    trained = build(VARIANTS[variant], 1, torch.float64)
    export(trained, tmp_path / "draft", dtype="float32")
    served = DraftModel.load(tmp_path / "draft", torch.float64, torch.device("cpu"))
    config = served.config

    generator = torch.Generator().manual_seed(17)
    ids = torch.randint(0, VOCABULARY - 1, (SAMPLES, LENGTH), generator=generator)
    width = len(config.target_layer_ids) * config.hidden_size
    taps = torch.randn(LENGTH, SAMPLES, width, generator=generator, dtype=torch.float64)
    final = torch.randn(LENGTH, SAMPLES, config.hidden_size, generator=generator, dtype=torch.float64)
    anchors = torch.tensor([[1, 6, 13], [3, 4, 14]])
    with torch.no_grad():
        rows = trained(ids, torch.ones(SAMPLES, LENGTH, dtype=torch.bool), anchors, taps, final)
        tables = (trained.lm_head.weight, trained.markov_head.markov_w2.weight)
        logits = sum(x @ w[:VOCABULARY].T for x, w in zip((rows.hidden, rows.latent), tables, strict=True))
        compared = 0
        for number, anchor in enumerate(anchors.flatten().tolist()):
            sample = number // anchors.shape[1]
            context = served.new_context(LENGTH)
            served.extend_context(context, taps[:anchor, sample])
            following = ids[sample, anchor + 1 : anchor + 1 + config.block_size].tolist()
            forced = scripted(following + [0] * (config.block_size - len(following)))
            proposal = served.propose(context, int(ids[sample, anchor]), forced)
            block = rows.block == number
            slots = rows.slot[block]
            assert len(slots) == len(following)
            torch.testing.assert_close(proposal.logits[slots], logits[block], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(proposal.hidden[slots], rows.hidden[block], rtol=1e-12, atol=1e-12)
            if config.enable_confidence_head:
                confidence = proposal.confidence[slots]
                torch.testing.assert_close(confidence, rows.confidence_logits[block], rtol=1e-12, atol=1e-12)
            compared += len(slots)
    assert compared == rows.hidden.shape[0] > 20
