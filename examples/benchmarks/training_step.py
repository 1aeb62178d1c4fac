"""CPU seconds of one training step by part, with the fused objective and with materialized logits side by side.

The parts are timed apart: the objective is run on detached hidden states, so that its own backward is in its time and
the draft's backward is not. Both objectives see the same batch and the same weights, take turns, and must give the
same loss. Features are captured in every step (a run with `feature_memory_gib` saves that in later epochs).

    python examples/benchmarks/training_step.py
    python examples/benchmarks/training_step.py --recipe recipes/smollm2.py:quickstart --target FOLDER --data FILE \
        --anchors 12 --anchors 24
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.nn.functional as F
import typer
from megatron.core.distributed import finalize_model_grads
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from megatron_dspark.data.encoded import load_samples
from megatron_dspark.data.sampler import Dealer, MicroBatch, Sampler
from megatron_dspark.objective import loss as objective
from megatron_dspark.objective.fused import VocabTerms, vocab_parallel_ce_l1
from megatron_dspark.parallel import process_groups
from megatron_dspark.targets.folder import read_target_config
from megatron_dspark.training.recipes import load_recipe
from megatron_dspark.training.settings import TrainSettings
from megatron_dspark.training.setup import build_training

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny_target"
PARTS = ("target", "draft_forward", "objective", "draft_backward", "optimizer")


def materialized(
    hidden: Tensor,
    latent: Tensor | None,
    lm_head: Tensor,
    markov_w2: Tensor | None,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    ce_weight: Tensor,
    l1_weight: Tensor,
    *,
    vocab_size: int,
    **_: Any,
) -> VocabTerms:
    """`vocab_parallel_ce_l1` of one rank with every [rows, vocabulary] tensor in memory."""
    logits = hidden @ lm_head[:vocab_size].t()
    if latent is not None and markov_w2 is not None:
        logits = logits + latent @ markov_w2[:vocab_size].t()
    with torch.no_grad():
        teacher = teacher_hidden @ teacher_head[:vocab_size].t()
        q = teacher.softmax(-1)
    ce = F.cross_entropy(logits, labels, reduction="none")
    l1 = (logits.softmax(-1) - q).abs().sum(-1)
    agree = (logits.detach().argmax(-1) == teacher.argmax(-1)).to(l1.dtype)
    ce_weight, l1_weight = ce_weight.to(ce.dtype), l1_weight.to(l1.dtype)
    accept = (1 - l1.detach() / 2).clamp(0, 1)
    return VocabTerms((ce_weight * ce + l1_weight * l1).sum(), ce.detach(), l1.detach(), accept, agree, ce.isfinite())


OBJECTIVES: dict[str, Callable[..., VocabTerms]] = {"fused": vocab_parallel_ce_l1, "materialized": materialized}


class Step:
    """A model with its optimizer, and one batch."""

    def __init__(
        self, settings: TrainSettings, batch: MicroBatch, built: tuple[list[Any], Any, Any], groups: Any
    ) -> None:
        self.batch, self.groups, self.size = batch, groups, settings.global_batch_size
        (self.model,), self.optimizer, _ = built
        self.module = self.model
        while hasattr(self.module, "module"):
            self.module = self.module.module
        # The weights do not move, so that every step is the same step.
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def run(self, implementation: str) -> dict[str, float]:
        """One step; CPU seconds by part, the loss and the number of supervised rows."""
        seconds: dict[str, float] = {}

        @contextmanager
        def part(name: str) -> Iterator[None]:
            start = time.process_time()
            yield
            seconds[name] = time.process_time() - start

        batch, module = self.batch, self.module
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with part("target"):
            features = module.target.capture(batch.input_ids)
        with part("draft_forward"):
            rows = module.draft(
                batch.input_ids, batch.loss_mask, batch.anchors, features.taps, features.final_hidden, None, None
            )
        made = {name: getattr(rows, name) for name in ("hidden", "latent", "confidence_logits")}
        made = {name: tensor for name, tensor in made.items() if tensor is not None}
        for name, tensor in made.items():
            setattr(rows, name, tensor.detach().requires_grad_())
        config = module.dspark_config
        with part("objective"), mock.patch.object(objective, "vocab_parallel_ce_l1", OBJECTIVES[implementation]):
            loss, num_tokens, _ = objective.dspark_loss(
                rows,
                lm_head=module.draft.lm_head.weight,
                teacher_head=module.draft.teacher_head_weight,
                markov_w2=module.draft.markov_head.markov_w2.weight,
                config=module.objective_config,
                chunk_bytes=config.objective_chunk_bytes,
                kernel=config.objective_kernel,
            )
            loss.backward()
        with part("draft_backward"):
            torch.autograd.backward(list(made.values()), [getattr(rows, name).grad for name in made])
        with part("optimizer"):
            finalize_model_grads([self.model], num_tokens.clone(), pg_collection=self.groups)
            self.optimizer.step()
        return seconds | {"loss": float(loss.detach() / num_tokens), "rows": len(rows.labels)}


def measure(settings: TrainSettings, repeat: int, progress: bool) -> list[dict[str, Any]]:
    """Both objectives on one batch, in turns; of each part the fastest run."""
    target = read_target_config(settings.target)
    config = settings.model_config(target)
    samples = load_samples(settings.data, target.folder, settings.max_length)
    sampler = Sampler(
        samples,
        anchors=settings.anchor_rule,
        dealer=Dealer(settings.micro_batch_size),
        global_batch_size=settings.micro_batch_size,
    )
    batch = next(sampler.step_batches(0))
    with process_groups(1, settings.seed) as groups:
        step = Step(settings, batch, build_training(settings, config, groups), groups)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in OBJECTIVES}
        label = f"{settings.num_anchors} anchors"
        for _ in track(range(repeat), label, console=Console(stderr=True), disable=not progress):
            for name, done in runs.items():
                done.append(step.run(name))
    losses = {name: done[0]["loss"] for name, done in runs.items()}
    if abs(losses["fused"] - losses["materialized"]) > 1e-4 * abs(losses["materialized"]):
        raise SystemExit(f"the two objectives disagree, so their times mean nothing: {losses}")
    results = []
    for name, done in runs.items():
        parts = {f"{part}_s": round(min(run[part] for run in done), 4) for part in PARTS}
        results.append(
            {
                "impl": name,
                "anchors": settings.num_anchors,
                "rows": int(done[0]["rows"]),
                "tokens": list(batch.input_ids.shape),
                "vocab": target.vocab_size,
                "hidden": target.hidden_size,
                **parts,
                "step_s": round(sum(parts.values()), 4),
                "loss": done[0]["loss"],
            }
        )
    return results


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    samples, length = results[0]["tokens"]
    title = f"One step, CPU seconds: {samples} samples of {length} tokens, vocabulary {results[0]['vocab']:,}"
    table = Table(title=title)
    for column in ("", "anchors", "rows", *(part.replace("_", " ") for part in PARTS), "step"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for result in results:
        seconds = [f"{result[f'{part}_s']:.3f}" for part in (*PARTS, "step")]
        table.add_row(result["impl"], str(result["anchors"]), str(result["rows"]), *seconds)
    Console().print(table)


def main(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target.")] = TINY / "model",
    data: Annotated[Path, typer.Option(help="JSONL of conversations.")] = TINY / "data" / "train.jsonl",
    recipe: Annotated[str, typer.Option(help="The draft and its settings.")] = f"{ROOT}/recipes/tiny_target.py:small",
    anchors: Annotated[list[int], typer.Option(help="Anchors a sample; may be given several times.")] = [16],  # noqa: B006
    samples: Annotated[int, typer.Option(help="Samples of the batch.", min=1)] = 4,
    repeat: Annotated[int, typer.Option(help="Steps with each objective; the fastest counts.", min=1)] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of the table.")] = False,
) -> None:
    """Measure one training step by part, with both objectives."""
    torch.set_num_threads(1)
    results = []
    for count in anchors:
        settings = load_recipe(recipe)
        settings.target, settings.data, settings.output = str(target), str(data), "unused"
        settings.num_anchors, settings.micro_batch_size, settings.global_batch_size = count, samples, samples
        settings.validate()
        results += measure(settings, repeat, progress=Console().is_terminal and not as_json)
        if as_json:
            for result in results[-len(OBJECTIVES) :]:
                print(json.dumps(result), flush=True)
    if not as_json:
        show(results)


if __name__ == "__main__":
    main_app = typer.Typer()
    main_app.command()(main)
    main_app()
