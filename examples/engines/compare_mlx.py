"""Serve an exported draft with mlx-dspark, greedy, and compare its accepted length with the verifier's.

Runs inside the environment that mlx.sh makes; it imports nothing of megatron_dspark.
"""

import argparse
import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_dspark.generate import speculative_generate
from mlx_dspark.load import load_drafter, load_target


def main() -> None:
    """Print one JSON object: what the engine accepted, what the verifier recorded, and how far apart they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", type=Path, required=True, help="exported draft (DeepSpec layout)")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of messages; a last answer is left out")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--verified", type=Path, help="output of megatron-dspark verify --json; default: the record")
    arguments = parser.parse_args()

    described = json.loads((arguments.target / "config.json").read_text())
    if described.get("model_type") == "llama" and "rope_theta" not in described:
        parser.error(
            "the target's config.json says its rotary base in rope_parameters alone, and mlx-lm's Llama reads "
            "rope_theta at top level alone: it would compute another target; write rope_theta there too"
        )

    # As exported: mlx-dspark would quantise the draft to 4 bits. The verifier computes in FP32, so do both models here.
    drafter, config = load_drafter(str(arguments.draft), quantize=False)
    target, tokenizer = load_target(str(arguments.target), require_tap=True)
    drafter.set_dtype(mx.float32)
    target.model.set_dtype(mx.float32)

    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()][: arguments.limit or None]
    prompts, committed, iterations = [], 0, 0
    for row in rows:
        messages = row["messages"]
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        result = speculative_generate(
            target,
            tokenizer,
            drafter,
            prompt_ids=list(ids),
            max_new_tokens=arguments.max_new_tokens,
            max_draft_tokens=None,  # the whole block
            lookup_drafts=False,  # its n-gram drafts would be counted as the draft's
        )
        tokens = result.token_ids[: arguments.max_new_tokens]
        # As the verifier counts: what each iteration committed, the last one's tokens beyond the limit included.
        committed += sum(result.accept_lengths)
        iterations += result.num_rounds
        prompts.append({"id": row.get("id"), "tokens": tokens, "iterations": result.num_rounds})
        # Minutes a prompt on a CPU.
        print(
            f"{len(prompts)} of {len(rows)} prompts: {committed} tokens in {iterations} iterations",
            file=sys.stderr,
            flush=True,
        )

    engine = committed / iterations
    verifier = _verified(arguments)
    print(
        json.dumps(
            {
                "prompts": len(prompts),
                "block_size": config.block_size,
                "iterations": iterations,
                "accepted_length": engine,
                "verifier_accepted_length": verifier,
                "relative_difference": None if verifier is None else engine / verifier - 1,
                "answers": prompts,
            }
        )
    )


def _verified(arguments: argparse.Namespace) -> float | None:
    if arguments.verified is not None:
        return json.loads(arguments.verified.read_text().splitlines()[-1])["accepted_length"]
    record = json.loads((arguments.draft / "dspark_export.json").read_text())
    return ((record.get("accepted_length") or {}).get("greedy") or {}).get("tokens_per_iteration")


if __name__ == "__main__":
    main()
