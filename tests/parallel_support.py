"""Whole training runs of a tiny target and draft in float64, recorded gradient by gradient, under any layout."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_dspark.training import settings as settings_module
from megatron_dspark.training import setup
from megatron_dspark.training.overrides import override, settings_from_dict
from megatron_dspark.training.report import read_metrics
from megatron_dspark.training.run import train
from megatron_dspark.training.settings import (
    DraftSettings,
    OptimizerSettings,
    TrainSettings,
)
from tests.data_support import byte_tokenizer

STEPS = 2
# What a clock, the machine or the layout decides.
UNCOMPARED = ("tokens_per_second", "step_seconds", "peak_memory_gib", "seconds", "padding_share")
MAX_LENGTH = 70
# The header and the turns' marks are 19 tokens: of the third reply one token is kept, and no anchor is eligible.
CONVERSATIONS = (
    ("hi", "hello there"),
    ("count", "one two three four"),
    ("q" * (MAX_LENGTH - 20), "cut"),
    ("say a", "a"),
    ("more", "some more words here"),
    ("last", "the end"),
)


def save_target(folder: Path, tied: bool = False) -> Path:
    """Four layers that 2 stages, 2 × 2 virtual stages and 4 tensor-parallel ranks divide; a vocabulary of 259."""
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_conversations(path: Path, conversations: Sequence[tuple[str, str]] = CONVERSATIONS) -> Path:
    """Conversations of different lengths; one of them has no place for an anchor."""
    rows = [
        {
            "id": f"c{number}",
            "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}],
        }
        for number, (asked, answered) in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_inputs(folder: Path, tied: bool = False) -> Path:
    """What `settings` names in `folder`: a target, and conversations to train on and to validate with."""
    save_target(folder / "target", tied)
    save_conversations(folder / "data.jsonl")
    return folder


def settings(folder: Path, output: Path, **changes: Any) -> TrainSettings:
    """Two steps of one process with everything in one micro-batch; `changes` lay it out otherwise."""
    base = TrainSettings(
        target=str(folder / "target"),
        data=str(folder / "data.jsonl"),
        validation=str(folder / "data.jsonl"),
        output=str(output),
        steps=STEPS,
        global_batch_size=4,
        micro_batch_size=4,
        max_length=MAX_LENGTH,
        num_anchors=3,
        log_interval=1,
        validation_interval=STEPS,
        validation_samples=3,
        save_interval=STEPS,
        tensorboard=False,
        draft=DraftSettings(
            num_layers=2,
            block_size=3,
            target_layer_ids=[0, 1, 2],
            mask_token_id=258,
            markov_rank=8,
            markov_head_type="gated",
            initializer_std=0.2,
        ),
        # Clipping is active in every step, so that a wrong norm moves every parameter.
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_share=0.0, weight_decay=0.1, clip_grad=0.05),
    )
    return override(base, [f"{name}={value}" for name, value in changes.items()])


@dataclass
class Record:
    """What one rank saw of a run.

    Attributes:
        tensor_rank: rank and size in the tensor-parallel group.
        gradients: for every step, name -> this rank's part of the gradient after it was finalised.
        parameters: name -> this rank's part of the trainable parameters at the end.
        report: the metrics that this rank returned, without what the clock decides.
        held: parameters of this rank's draft, frozen ones included.
    """

    tensor_rank: tuple[int, int] = (0, 1)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


def trainable(model: list[Any]) -> dict[str, Tensor]:
    """name -> trainable parameter of all chunks, without the wrappers' prefixes."""
    found = {}
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                found[name.replace("module.", "")] = parameter
    return found


_FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.arange)
_FACTORIES += (torch.zeros_like, torch.ones_like, torch.empty_like)


class Float64(TorchFunctionMode):
    """Runs what asks for FP32 in float64: Megatron-Core's optimizers know no wider type than FP32.

    Everything else of a run is as it is in production, and what remains between two layouts is rounding at 1e-16.
    """

    def __enter__(self) -> "Float64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        settings_module.PRECISIONS["fp32"] = torch.float64
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)
        settings_module.PRECISIONS["fp32"] = torch.float32

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if function is torch.Tensor.float and arguments[0].dtype == torch.float64:
            return arguments[0]
        if function in _FACTORIES and keywords.get("dtype") is torch.float32:
            keywords = {**keywords, "dtype": torch.float64}
        result = function(*arguments, **keywords)
        if function is torch.Tensor.type and result == "torch.cuda.DoubleTensor":
            return "torch.cuda.FloatTensor"
        return result


@contextmanager
def whole_gradients(model: list[Any]) -> Iterator[None]:
    """Gather what a distributed optimizer leaves in shards, and put the shards' surroundings back afterwards."""
    import torch.distributed as dist

    kept = []
    for chunk in model:
        if chunk.ddp_config.use_distributed_optimizer:
            for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
                kept.append((bucket.grad_data, bucket.grad_data.clone()))
                shards = list(bucket.grad_data.chunk(dist.get_world_size(buffer_group(chunk))))
                own = shards[dist.get_rank(buffer_group(chunk))].clone()
                dist.all_gather(shards, own, group=buffer_group(chunk))
    yield
    for data, original in kept:
        data.copy_(original)


def buffer_group(chunk: Any) -> Any:
    """The ranks that share a wrapped stage's gradients."""
    return chunk.buffers[0].data_parallel_group


@contextmanager
def recorded() -> Iterator[Record]:
    """Record every finalised gradient of the runs inside."""
    from megatron.core import parallel_state

    record, original, models = Record(), setup.finalize_model_grads, []

    def finalize(model: list[Any], *arguments: Any, **keywords: Any) -> None:
        original(model, *arguments, **keywords)
        models[:] = model
        record.tensor_rank = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        record.held = [
            name.replace("module.", "") for chunk in model for name, _ in chunk.named_parameters() if "draft." in name
        ]
        with whole_gradients(model):
            record.gradients.append({name: p.main_grad.clone() for name, p in trainable(model).items()})

    setup.finalize_model_grads = finalize
    try:
        yield record
    finally:
        setup.finalize_model_grads = original
    record.parameters = {name: p.detach().clone() for name, p in trainable(models).items()}


def run(rank: int, size: int, values: dict[str, Any]) -> Record:
    """Train under `values` (settings as a dictionary); every rank of a pool calls it."""
    with Float64(), recorded() as record:
        report = train(settings_from_dict(values))
    record.report = {
        split: {name: value for name, value in getattr(report, split).items() if name not in UNCOMPARED}
        for split in ("train", "validation", "first_validation")
    }
    return record


def part_of(whole: Tensor, like: Tensor, name: str, rank: int, size: int) -> Tensor:
    """The rows or columns of `whole` that a tensor-parallel rank holds, told by the shape of its own part."""
    if whole.shape == like.shape:
        return whole
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    if whole.shape[1:] == like.shape[1:]:
        rows = torch.zeros(like.shape[0] * size, *whole.shape[1:], dtype=whole.dtype)
        rows[: whole.shape[0]] = whole[: rows.shape[0]]
        return rows.chunk(size)[rank]
    return whole.chunk(size, dim=1)[rank]


def assert_equal_runs(records: list[Record], expected: Record, tolerance: float = 1e-10) -> None:
    """Every gradient of every step and every parameter equals one process's, on whichever rank holds it."""
    seen: set[str] = set()
    for number, record in enumerate(records):
        rank, size = record.tensor_rank
        assert len(record.gradients) == len(expected.gradients)
        pairs = [*zip(record.gradients, expected.gradients, strict=True), (record.parameters, expected.parameters)]
        for step, (ours, theirs) in enumerate(pairs):
            assert ours.keys() in (theirs.keys(), set()), ours.keys() ^ theirs.keys()
            seen |= ours.keys()
            for name, value in ours.items():
                difference = (value - part_of(theirs[name], value, name, rank, size)).abs().max().item()
                assert difference <= tolerance, f"rank {number}, step {step}, {name} differs by {difference}"
    assert seen == expected.parameters.keys()


def compared(output: Path) -> list[dict[str, Any]]:
    """The logged lines of a run, without what the clock decides."""
    lines = read_metrics(output, "train") + read_metrics(output, "validation")
    return [{name: value for name, value in line.items() if name not in UNCOMPARED} for line in lines]


def assert_equal_metrics(
    found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], tolerance: float = 1e-10
) -> None:
    """Lines of `compared` have the same metrics; one without anything to average is NaN, or None, in both."""
    assert len(found) == len(expected) > 0
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            wanted = other[name]
            if isinstance(wanted, float):
                wanted = pytest.approx(wanted, rel=tolerance, abs=tolerance, nan_ok=True)
            same = value == wanted
            assert same, f"{line['split']} {name} differs: {value} and {other[name]}"
