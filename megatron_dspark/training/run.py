"""A training run from settings to checkpoints: read top to bottom."""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import get_pp_last_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from rich.table import Table

from megatron_dspark import platform
from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.data.chat import ChatSample
from megatron_dspark.data.encoded import load_samples
from megatron_dspark.data.sampler import Dealer, MicroBatch, Sampler, validation_batches
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.feed import FeatureFeed
from megatron_dspark.features.colocated import TargetFeatures
from megatron_dspark.features.memory import FeatureMemory
from megatron_dspark.files import finite
from megatron_dspark.objective.metrics import reduce_report
from megatron_dspark.parallel import process_groups
from megatron_dspark.targets.computable import check_computable
from megatron_dspark.targets.folder import TargetConfig, read_target_config
from megatron_dspark.training.bigrams import start_from_bigrams
from megatron_dspark.training.checkpoint import (
    Checkpoint,
    checkpoints_folder,
    find_checkpoint,
    load_checkpoint,
    rank_state,
    sharded_state,
)
from megatron_dspark.training.code_version import code_version
from megatron_dspark.training.interruption import Interruption
from megatron_dspark.training.job import lost_ranks, sole_writer
from megatron_dspark.training.loss_scale import loss_scaler, update
from megatron_dspark.training.offline import open_features
from megatron_dspark.training.rank_state import rng_state, set_rng_state
from megatron_dspark.training.report import Reporter, peak_memory_bytes
from megatron_dspark.training.saving import CheckpointWriter
from megatron_dspark.training.settings import TrainSettings
from megatron_dspark.training.setup import (
    agreed_by_ranks,
    build_training,
    check_output,
    check_resumable,
    describe_data,
    find_draft_stage,
    forward_communicator,
    refuse_lost_checkpoints,
    refuse_mask_in_data,
    refuse_without_anchors,
)
from megatron_dspark.training.step import forward_step_dspark
from megatron_dspark.training.warm_start import WarmStart, open_warm_start, warm_start_model
from megatron_dspark.training.window import Window


@dataclass(frozen=True)
class TrainReport:
    """How a run ended: the last metrics of each split, and where its files are.

    `stopped` says what ended it before its last step ("SIGTERM", "SIGUSR1", "time limit"); None when it is complete.
    """

    output: str
    checkpoint: str | None
    steps: int
    seconds: float
    first_validation: dict[str, float]
    validation: dict[str, float]
    train: dict[str, float]
    stopped: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dict(self.__dict__)

    def render(self) -> Table:
        """Return the run's metrics as a table."""
        ended = f"stopped by {self.stopped}: " if self.stopped else ""
        table = Table(title=f"Trained {self.steps} steps in {self.seconds:.0f} s: {ended}{self.checkpoint}")
        table.add_column("metric")
        columns = {"held-out, start": self.first_validation, "held-out, end": self.validation, "train, end": self.train}
        for name in columns:
            table.add_column(name, justify="right")
        for metric in sorted({name for metrics in columns.values() for name in metrics}):
            values = (finite(metrics.get(metric)) for metrics in columns.values())
            table.add_row(metric, *("-" if value is None else f"{value:.4g}" for value in values))
        return table


def train(settings: TrainSettings, *, resume: bool = True) -> TrainReport:
    """Run training, from the newest checkpoint of the output folder when it has one.

    Under torchrun every rank calls this; alone it is a job of one rank. SIGTERM, SIGUSR1 and the time limit save and
    stop it, whichever rank they reach; the report says so.

    Args:
        settings: the run.
        resume: go on from the newest checkpoint; False refuses a folder that has one.

    Raises:
        DSparkError: anything that cannot work, before a process group, model or file is made; later a checkpoint that
            cannot be written, or (LostRankError) another rank that is gone.
    """
    interruption = Interruption(settings.time_limit_minutes)
    settings.validate()
    offline = open_features(settings) if settings.features else None
    if offline:
        target = offline.target
    else:
        target = read_target_config(settings.target)
        check_computable(target)
    config = settings.model_config(target)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config.validate(world_size)
    if offline:
        offline.check(settings, config)
        samples, held_out, data = offline.samples, offline.held_out, offline.describe()
    else:
        data = describe_data(settings)
        samples = load_samples(settings.data, target.folder, settings.max_length)
        held_out = load_samples(settings.validation, target.folder, settings.max_length) if settings.validation else []
        data["samples"] = samples.fingerprint
    check_output(settings.output)
    checkpoint = find_checkpoint(settings.output, settings.checkpoint.resume_from)
    if checkpoint is not None:
        check_resumable(settings, target, data, checkpoint, resume)
    else:
        refuse_lost_checkpoints(settings)
    warm_start = None
    if checkpoint is None and settings.warm_start is not None:
        warm_start = open_warm_start(settings.warm_start, config)
    # Nor do the sampler's refusals need a process group.
    parallel = settings.parallel
    _sampler(settings, samples, 0, world_size // parallel.ranks)
    refuse_mask_in_data(samples, config.mask_token_id)
    refuse_without_anchors(samples, settings.anchor_rule, settings.max_length)
    with (
        interruption,
        process_groups(
            parallel.tensor,
            settings.seed,
            context_parallel_size=parallel.context,
            pipeline_parallel_size=parallel.pipeline,
            virtual_pipeline_parallel_size=parallel.virtual_pipeline,
            timeout_minutes=settings.timeout_minutes,
            agreed=agreed_by_ranks(settings, target, data),
        ) as groups,
        sole_writer(settings, checkpoint),
        lost_ranks(settings),
    ):
        feed = offline.feed(groups.cp.rank(), groups.cp.size()) if offline else None
        run = _Run(settings, config, target, data, groups, samples, held_out, checkpoint, warm_start, feed)
        return run.train(interruption)


class _Run:
    def __init__(
        self,
        settings: TrainSettings,
        config: DSparkModelConfig,
        target: TargetConfig,
        data: dict[str, Any],
        groups: ProcessGroupCollection,
        samples: Sequence[ChatSample],
        held_out: Sequence[ChatSample],
        checkpoint: Checkpoint | None,
        warm_start: WarmStart | Checkpoint | None,
        feed: FeatureFeed | None = None,
    ) -> None:
        self.settings, self.config, self.target, self.data, self.groups = settings, config, target, data, groups
        self.models, self.optimizer, self.scheduler = build_training(settings, config, groups)
        # The stage that holds the draft: None on the ranks of the other pipeline stages.
        self.draft_stage = find_draft_stage(self.models)
        self.communicator = forward_communicator(self.models, groups)
        self.step = 0
        self.metrics: dict[str, dict[str, float]] = {"first_validation": {}, "validation": {}, "train": {}}
        draft = None if self.draft_stage is None else self.draft_stage.draft
        if checkpoint is None and settings.draft.markov_start == "bigrams":
            start_from_bigrams(draft, samples, config.markov_rank)
            self.optimizer.reload_model_params()
        if warm_start is not None:
            warm_start_model(self.draft_stage, warm_start)
            self.optimizer.reload_model_params()
        self.window, self.validated_step = Window(), None
        own = None
        if checkpoint is not None:
            own = load_checkpoint(checkpoint, self.draft_stage, self.optimizer, self.scheduler, groups.pp, self.layout)
            self.step, self.metrics = checkpoint.step, checkpoint.run["metrics"]
            if own is not None:
                self.window.load_state_dict(own["window"], platform.device())
            elif groups.dp_cp.rank() == 0 and self.counts:
                self.window.load_state_dict(checkpoint.run["window"], platform.device())
        rank, size = groups.dp.rank(), groups.dp.size()
        self.sampler = _sampler(settings, samples, rank, size)
        self.held_out = validation_batches(
            held_out[: settings.validation_samples], self.sampler.dealer, self.sampler.anchors
        )
        self.memory, self.feed = None, feed
        if settings.feature_memory_gib > 0 and feed is None:
            limit = int(settings.feature_memory_gib * 2**30)
            self.memory = FeatureMemory(self.draft_stage.target.capture, limit)
        self.forward_backward = get_forward_backward_func()
        self.writer = CheckpointWriter(settings.output, settings.checkpoint, lambda: self.reporter.to_disk())
        if checkpoint is not None:
            # Before the metrics after it are dropped.
            self.writer.point_at(checkpoint.step)
        self.reporter = Reporter(
            Path(settings.output),
            settings.steps,
            self.step,
            active=torch.distributed.get_rank() == 0,
            tensorboard=settings.tensorboard,
        )
        if checkpoint is not None and checkpoint.run["code"] != code_version():
            self.reporter.say(
                f"the checkpoint of step {self.step} was written by {checkpoint.run['code']} and this is "
                f"{code_version()}: the numbers may differ"
            )
        if own is not None:
            # Last: building and loading draw random numbers.
            set_rng_state(own["rng"])

    @property
    def layout(self) -> dict[str, int]:
        """How this job is laid out: in the same layout every rank finds what it alone had."""
        sizes = {"tensor": self.groups.tp.size(), "context": self.groups.cp.size(), "pipeline": self.groups.pp.size()}
        return {"world_size": torch.distributed.get_world_size(), **sizes}

    @property
    def counts(self) -> bool:
        """Whether this rank has reports of its own: other stages have none, other tensor-parallel ranks the same."""
        return self.draft_stage is not None and self.groups.tp.rank() == 0

    def train(self, interruption: Interruption) -> TrainReport:
        """Run the steps that are left, until `interruption` says to stop."""
        settings, started = self.settings, time.perf_counter()
        first_step, clock, stopped = self.step, _Clock(), None
        try:
            if self.step == 0:
                self.metrics["first_validation"] = self.validate()
            clock.restart()
            while self.step < settings.steps and stopped is None:
                self.window.add(*self.optimizer_step())
                self.step += 1
                self.writer.poll()
                self.reporter.advance(self.step)
                last = self.step == settings.steps
                if self.step % settings.log_interval == 0 or last or self.step == 1:
                    seconds = clock.lap()
                    left = clock.total / (self.step - first_step) * (settings.steps - self.step)
                    self.log(self.window, seconds, left)
                    self.window = Window()
                with clock.paused():
                    if self.step % settings.validation_interval == 0 or last:
                        self.metrics["validation"] = self.validate()
                        self.validated_step = self.step
                    stopped = None if last else interruption.agreed()
                    if self.step % settings.save_interval == 0 or last or stopped:
                        self.save()
            self.writer.finish()
            saved = self.writer.saved_step
            return TrainReport(
                output=settings.output,
                checkpoint=None if saved is None else str(checkpoints_folder(settings.output) / f"step-{saved:07d}"),
                steps=self.step,
                seconds=time.perf_counter() - started,
                stopped=stopped,
                **self.metrics,
            )
        finally:
            self.reporter.close()
            if self.feed is not None:
                self.feed.close()

    def optimizer_step(self) -> tuple[list[dict[str, torch.Tensor]], list[MicroBatch], float | None]:
        """Run one optimizer step; return its micro-batch reports, this rank's micro-batches and the gradient norm.

        The norm is None when fp16 overflowed and the step was skipped.
        """
        with contextlib.nullcontext() if self.feed is None else self.feed.waiting():
            batches = list(self.sampler.step_batches(self.step * self.settings.global_batch_size))
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        following = (self.step + 1) * self.settings.global_batch_size if self.step + 1 < self.settings.steps else None
        reports = self._pass(batches, forward_only=False, following=following)
        self._refuse_non_finite(f"step {self.step + 1}", reports, batches)
        self.learning_rate = max(group["lr"] for group in self.optimizer.param_groups)
        done = update(self.optimizer, self.step + 1, [name for batch in batches for name in batch.sample_ids])
        if done.grad_norm is not None:
            self.scheduler.step(increment=1)
        else:
            self.reporter.say(
                f"step {self.step + 1} is skipped: its gradients overflow fp16 at the loss scale {done.loss_scale:g}; "
                f"the next one has {done.next_loss_scale:g}"
            )
        return reports, batches, done.grad_norm

    def _pass(
        self, batches: list[MicroBatch], forward_only: bool, following: int | None = None
    ) -> list[dict[str, torch.Tensor]]:
        # Every stage reads the micro-batches by itself: only features travel through the pipeline.
        iterators = [self._data(batches, following) for _ in self.models]
        pipeline = {}
        if self.communicator is not None:
            pipeline = {"p2p_communicator": self.communicator, "pg_collection": self.groups}
        return self.forward_backward(
            forward_step_func=forward_step_dspark,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.models,
            num_microbatches=len(batches),
            seq_length=self.settings.max_length,
            micro_batch_size=self.settings.micro_batch_size,
            forward_only=forward_only,
            **pipeline,
        )

    def _data(self, batches: list[MicroBatch], following: int | None) -> Iterator[Any]:
        """The micro-batches with what is known of their features; `following` is the stream's next position."""
        if self.feed is not None:
            upcoming = () if following is None else self.sampler.step_batches(following)
            return self.feed.over(batches, upcoming, count=self.models[0].training)
        return iter(batches) if self.memory is None else map(self._with_features, batches)

    def _with_features(self, batch: MicroBatch) -> tuple[MicroBatch, TargetFeatures]:
        return batch, self.memory.features(batch.input_ids.to(platform.device()), batch.lengths, batch.documents)

    def _refuse_non_finite(self, what: str, reports: list[dict[str, torch.Tensor]], batches: list[MicroBatch]) -> None:
        """End the job when any rank has a loss that is not finite, before the optimizer uses its gradient.

        A rank that raised alone would leave the others waiting in their next collective: all learn of it here, and
        all raise the same sentence.
        """
        # Stages without the draft have no report; they take part in the exchange.
        sums = [report["loss"].sum() for report in reports]
        losses = torch.stack(sums) if sums else torch.zeros(0, device=platform.device())
        bad = (~torch.isfinite(losses)).any().to(torch.int32)
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
        if not bad:
            return
        pairs = zip(losses.isfinite().tolist(), batches if reports else [], strict=True)
        mine = [name for finite, batch in pairs if not finite for name in batch.sample_ids]
        every: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(every, mine)
        where = "; ".join(f"on rank {rank} (samples {names})" for rank, names in enumerate(every) if names)
        raise DSparkError(
            f"the loss of {what} is not finite {where}: look at these samples, or lower the learning rate."
        )

    def validate(self) -> dict[str, float]:
        """Evaluate on the held-out samples with their fixed anchors, and log."""
        if not self.held_out:
            return {}
        started = time.perf_counter()
        for model in self.models:
            model.eval()
        with torch.no_grad():
            reports = self._pass(self.held_out, forward_only=True)
        for model in self.models:
            model.train()
        self._refuse_non_finite(f"the validation at step {self.step}", reports, self.held_out)
        batches = self.held_out
        tokens, places = self._summed(
            sum(batch.num_tokens for batch in batches), sum(batch.input_ids.numel() for batch in batches)
        )
        metrics = self.reduce(reports, padding_share=1 - tokens / places)
        metrics["seconds"] = time.perf_counter() - started
        self.reporter.log("validation", self.step, metrics)
        return metrics

    def reduce(self, reports: list[dict[str, torch.Tensor]], **values: float) -> dict[str, float]:
        """Return the metrics of `reports` over data- and context-parallel ranks, and `values`, on every stage."""
        metrics = None if self.draft_stage is None else {**reduce_report(reports, self.groups.dp_cp), **values}
        if self.communicator is None:
            return metrics
        told, last = [metrics], get_pp_last_rank(self.groups.pp)
        torch.distributed.broadcast_object_list(told, last, self.groups.pp, device=platform.device())
        return told[0]

    def _summed(self, *counts: float) -> list[float]:
        """Return the sums of `counts` over data-parallel ranks."""
        sums = torch.tensor(counts, dtype=torch.float64, device=platform.device())
        torch.distributed.all_reduce(sums, group=self.groups.dp)
        return sums.tolist()

    def log(self, window: Window, seconds: float, seconds_left: float) -> None:
        """Log the steps of a window that took `seconds`."""
        tokens, places, timed_tokens = self._summed(window.tokens, window.places, window.timed_tokens)
        scaler = loss_scaler(self.optimizer)
        fp16 = {} if scaler is None else {"loss_scale": float(scaler.scale), "skipped_steps": window.skipped}
        padding_share = 1 - tokens / places
        if padding_share > 0.05 and not self.settings.packing and not self.metrics["train"]:
            self.reporter.say(
                f"{padding_share:.0%} of the micro-batches is padding; packing=true puts several conversations in a row"
            )
        metrics = self.reduce(
            window.reports,
            grad_norm=math.nan if window.grad_norm is None else window.grad_norm,
            learning_rate=self.learning_rate,
            **fp16,
            tokens_per_second=timed_tokens / seconds,
            padding_share=padding_share,
        )
        # The largest of all ranks: the first one may be a stage without the draft.
        peak = torch.tensor(peak_memory_bytes(), dtype=torch.float64, device=platform.device())
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
        metrics.update(
            step_seconds=seconds / window.timed_steps,
            peak_memory_gib=float(peak) / 2**30,
        )
        if self.feed is not None:
            metrics["data_wait_share"] = self.feed.lap() / seconds
        self.metrics["train"] = metrics
        self.reporter.log("train", self.step, metrics, seconds_left)

    def save(self) -> None:
        """Write a checkpoint of the current step, or begin to."""
        validated = self.validated_step == self.step
        run = {
            "settings": self.settings.as_dict(),
            "model": self.config.as_dict(),
            "target": {
                "name": self.target.name,
                "fingerprint": self.target.fingerprint(),
                "config": self.target.described,
            },
            "data": self.data,
            "metrics": self.metrics,
            "tau": self.metrics["validation"].get("tau") if validated else None,
            "progress": {"step": self.step, "consumed_samples": self.step * self.settings.global_batch_size},
            "window": self.window.total(self.counts, self.groups.cp.size()),
            "layout": self.layout,
            "code": code_version(),
        }
        state = sharded_state(self.draft_stage, self.optimizer, self.scheduler, self.groups.pp, loading=False)
        own = rank_state({"rng": rng_state(), "window": self.window.state_dict()})
        self.writer.save(self.step, {**state, **own}, run)


class _Clock:
    """Seconds spent training, without validation and saving."""

    def __init__(self) -> None:
        self.total = 0.0
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.total += seconds
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before


def _sampler(settings: TrainSettings, samples: Sequence[ChatSample], rank: int, size: int) -> Sampler:
    return Sampler(
        samples,
        anchors=settings.anchor_rule,
        dealer=Dealer(
            settings.micro_batch_size,
            rank,
            size,
            context_parallel_size=settings.parallel.context,
            row_tokens=(settings.packed_length or settings.max_length) if settings.packing else None,
            # The interleaved schedule runs whole rounds.
            multiple=settings.parallel.pipeline if settings.parallel.virtual_pipeline else 1,
        ),
        global_batch_size=settings.global_batch_size,
    )
