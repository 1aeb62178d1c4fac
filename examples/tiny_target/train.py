"""Train the tiny target: a Qwen3 model of under 4 MB that holds short conversations about cooking.

Everything is made here from the grammar in `recipe_text.py`: the tokenizer, the model, and two files of
conversations whose answers are the model's own (greedy). From the repository's root:
`python -m examples.tiny_target.train --help`.
"""

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_target.converse import answer_loss, console, converse, progress
from examples.tiny_target.recipe_text import draw_answers, draw_request
from megatron_dspark.data.chat import encode_messages
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import atomic_file, atomic_folder, read_json, write_json

VOCAB_SIZE = 1000  # divisible by 4, yet no multiple of 128: a draft's tables get padding rows in Megatron-Core
MAX_POSITIONS = 2048
END_OF_TEXT, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IGNORED = -100  # the label that transformers leaves out of the loss


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `VOCAB_SIZE` entries; ids 0 to 3 are the special tokens.

    `<|mask|>` stands in no text: it is there for the drafter, which fills the places it has to predict with it.
    """
    rng = random.Random(f"tokenizer {seed}")
    texts = (message["content"] for _ in range(3000) for message in draw_answers(rng, draw_request(rng)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The roles stand in the chat template, not in the messages; they are to be one token each all the same.
    tokenizer.train_from_iterator([*texts, *["user", "assistant", "system"] * 100], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise DSparkError(
            f"the text gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}; lower VOCAB_SIZE to fit"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh model: 8 layers, so that five taps fit between layer 1 and layer N-3; 8 heads and 4 KV heads for TP=4.

    Head width times heads (256) differs from the hidden size (128), and RoPE base and norm epsilon are not the
    defaults: code that mixes these up fails here.
    """
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # what writes into the residual stream starts small, as there are 16 such writers
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(0.25)
    model.generation_config.do_sample = False
    return model


def batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches of fresh conversations: `input_ids` and `labels` [size, S], padded on the right.

    Labels are on for the assistant's tokens; elsewhere stands `IGNORED`, as questions hold nothing that could be
    predicted. No attention mask is needed, because a causal model never looks right.
    """
    while True:
        conversations = [{"id": "", "messages": draw_answers(rng, draw_request(rng))} for _ in range(16 * size)]
        pool = [encode_messages(tokenizer, conversation, MAX_POSITIONS) for conversation in conversations]
        pool.sort(key=lambda sample: len(sample.input_ids))  # neighbours have the same length: hardly any padding
        groups = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(groups)
        for group in groups:
            labels = [torch.where(sample.loss_mask, sample.input_ids, IGNORED) for sample in group]
            yield {
                "input_ids": pad_sequence([sample.input_ids for sample in group], True, tokenizer.pad_token_id),
                "labels": pad_sequence(labels, True, IGNORED),
            }


def train(model: Qwen3ForCausalLM, data: Iterator[dict[str, torch.Tensor]], steps: int, peak_lr: float) -> float:
    """AdamW with a linear warm-up over a twentieth of the steps and a linear decay to zero.

    Returns:
        The mean loss of the last tenth of the steps, in nats a token.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_lr,
        betas=(0.9, 0.95),
    )
    warm_up = max(1, steps // 20)
    losses: list[float] = []
    model.train()
    with progress() as bar:
        task = bar.add_task("training", total=steps, note="")
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))
            loss = model(**next(data)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.update(task, advance=1, note=f"loss {losses[-1]:.3f}")
            if not console.is_terminal and (step + 1) % max(1, steps // 4) == 0:
                console.print(f"step {step + 1} of {steps}: loss {losses[-1]:.3f}")
    if not math.isfinite(losses[-1]):
        raise DSparkError(f"the loss became {losses[-1]} at learning rate {peak_lr}; use a lower one")
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bfloat16 and the tokenizer, in keys that transformers 4 and 5 both read.

    Version 5 alone would leave out `rope_theta`, for which version 4 (inside many serving engines) then silently takes
    another value, and would name a tokenizer class that version 4 does not know.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    config = read_json(folder / "config.json", "the tiny target's config")
    write_json(folder / "config.json", {**config, "rope_theta": config["rope_parameters"]["rope_theta"]})
    tokenizer.save_pretrained(folder)
    settings = read_json(folder / "tokenizer_config.json", "the tiny target's tokenizer settings")
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    del settings["backend"]
    write_json(folder / "tokenizer_config.json", settings)


def main(
    output: Annotated[Path, typer.Option(help="Folder that gets model/ and data/; neither may be there already.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of weights, text and prompts.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations a step.")] = 4,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 4e-3,
    train_conversations: Annotated[int, typer.Option(min=1, max=2000, help="Lines of data/train.jsonl.")] = 160,
    heldout_conversations: Annotated[int, typer.Option(min=1, max=500, help="Lines of data/heldout.jsonl.")] = 24,
) -> None:
    """Train the tiny target and let it answer a few hundred questions."""
    for part in (output / "model", output / "data"):
        if part.exists():
            raise DSparkError(f"{part} already exists; choose another --output or remove it first")
    transformers.utils.logging.disable_progress_bar()  # its bars for a 4 MB file only litter a pipe
    began, began_cpu = time.perf_counter(), time.process_time()
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters / 1e6:.2f} million parameters, {VOCAB_SIZE} tokens, {steps} steps of {batch_size}")
    data = batches(tokenizer, random.Random(f"training {seed}"), batch_size)
    training_loss = train(model, data, steps, learning_rate)
    trained, trained_cpu = time.perf_counter() - began, time.process_time() - began_cpu

    with atomic_folder(output / "model") as folder:
        save(model, tokenizer, folder)
    # What is measured and what answers is the stored model: rounded to bfloat16, computed in float32.
    model = AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    answers = answer_loss(model, tokenizer, 100, seed)
    report = {
        "steps": steps,
        "seed": seed,
        "training_loss": training_loss,
        "answer_loss": answers["loss"],
        "least_possible_answer_loss": answers["floor"],
    }
    with atomic_folder(output / "data") as folder:
        for name, count in (("train", train_conversations), ("heldout", heldout_conversations)):
            records, coherent = converse(model, tokenizer, count, name == "heldout", seed)
            report[f"{name}_ended_by_itself"] = sum(r["finish_reason"] == "stop" for r in records) / count
            report[f"{name}_coherent"] = sum(coherent) / count
            with atomic_file(folder / f"{name}.jsonl") as path:
                path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    report |= {
        "training_seconds": round(trained, 1),
        "training_cpu_seconds": round(trained_cpu, 1),
        "total_seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    try:
        typer.run(main)
    except DSparkError as error:
        console.print(f"error: {error}", style="red")
        raise SystemExit(2) from None
