"""A training run from settings to checkpoints: read top to bottom."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from megatron_dspark import platform
from megatron_dspark.builder import DSparkModelBuilder, check_against_target
from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.data.chat import ChatSample, load_samples
from megatron_dspark.data.sampler import MicroBatch, Sampler, validation_batches
from megatron_dspark.errors import DSparkError
from megatron_dspark.objective.loss import FractionalDivisor
from megatron_dspark.objective.metrics import reduce_report
from megatron_dspark.targets.folder import TargetConfig, read_target_config
from megatron_dspark.training.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, save_checkpoint
from megatron_dspark.training.report import Reporter, peak_memory_bytes
from megatron_dspark.training.settings import TrainSettings
from megatron_dspark.training.step import forward_step_dspark


@dataclass(frozen=True)
class TrainReport:
    """How a run ended: the last metrics of each split, and where its files are."""

    output: str
    checkpoint: str
    steps: int
    seconds: float
    first_validation: dict[str, float]
    last_validation: dict[str, float]
    last_train: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dict(self.__dict__)


def train(settings: TrainSettings, *, resume: bool = True) -> TrainReport:
    """Run training, from the newest checkpoint of the output folder when it has one.

    Under torchrun every rank calls this; alone it is a job of one rank.

    Args:
        settings: the run.
        resume: go on from the newest checkpoint; False refuses a folder that has one.

    Raises:
        DSparkError: anything that cannot work, before a process group, model or file is made.
    """
    settings.validate()
    target = read_target_config(settings.target)
    config = settings.model_config(target)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config.validate(world_size)
    check_against_target(config, target)
    checkpoint = find_checkpoint(settings.output)
    if checkpoint is not None:
        _check_resumable(settings, checkpoint, resume)
    samples, held_out = _read_data(settings, target)
    # Reading the sampler's own refusals needs no process group either.
    data_parallel_size = world_size // settings.parallel.tensor
    _sampler(settings, samples, 0, data_parallel_size)
    with process_groups(settings.parallel.tensor, settings.seed) as groups:
        return _Run(settings, config, groups, samples, held_out, checkpoint).train()


class _Run:
    def __init__(
        self,
        settings: TrainSettings,
        config: DSparkModelConfig,
        groups: ProcessGroupCollection,
        samples: list[ChatSample],
        held_out: list[ChatSample],
        checkpoint: Checkpoint | None,
    ) -> None:
        self.settings, self.config, self.groups = settings, config, groups
        self.model, self.optimizer, self.scheduler = build_training(settings, config, groups)
        self.step = 0
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.module, self.optimizer, self.scheduler)
            self.step = checkpoint.step
        rank, size = groups.dp.rank(), groups.dp.size()
        self.sampler = _sampler(settings, samples, rank, size)
        self.held_out = validation_batches(
            held_out[: settings.validation_samples],
            num_anchors=settings.num_anchors,
            micro_batch_size=settings.micro_batch_size,
            seed=settings.seed,
            data_parallel_rank=rank,
            data_parallel_size=size,
        )
        self.forward_backward = get_forward_backward_func()
        self.reporter = Reporter(
            Path(settings.output),
            settings.steps,
            self.step,
            active=torch.distributed.get_rank() == 0,
            tensorboard=settings.tensorboard,
        )

    @property
    def module(self) -> Any:
        """The DSparkModel inside its wrappers."""
        module = self.model
        while hasattr(module, "module"):
            module = module.module
        return module

    def train(self) -> TrainReport:
        settings, started, last_train, saved = self.settings, time.perf_counter(), {}, None
        first_step = self.step
        try:
            validation = self.validate() if self.step == 0 else {}
            first_validation = validation
            window: list[dict[str, torch.Tensor]] = []
            window_tokens, window_start, training_seconds = 0, time.perf_counter(), 0.0
            while self.step < settings.steps:
                reports, tokens, grad_norm = self.optimizer_step()
                self.step += 1
                window += reports
                window_tokens += tokens
                self.reporter.advance(self.step)
                last = self.step == settings.steps
                if self.step % settings.log_interval == 0 or last or self.step == 1:
                    seconds = time.perf_counter() - window_start
                    training_seconds += seconds
                    rate = training_seconds / (self.step - first_step)
                    last_train = self._log_window(window, window_tokens, seconds, grad_norm, rate)
                    window, window_tokens, window_start = [], 0, time.perf_counter()
                if self.held_out and (self.step % settings.validation_interval == 0 or last):
                    validation = self.validate()
                    window_start += validation["seconds"]
                if self.step % settings.save_interval == 0 or last:
                    before = time.perf_counter()
                    saved = self.save()
                    window_start += time.perf_counter() - before
            return TrainReport(
                output=settings.output,
                checkpoint=str(saved or find_checkpoint(settings.output).folder),
                steps=self.step,
                seconds=time.perf_counter() - started,
                first_validation=first_validation,
                last_validation=validation,
                last_train=last_train,
            )
        finally:
            self.reporter.close()

    def optimizer_step(self) -> tuple[list[dict[str, torch.Tensor]], int, float]:
        """Run one optimizer step; return its micro-batch reports, this rank's tokens and the gradient norm."""
        batches = list(self.sampler.step_batches(self.step * self.settings.global_batch_size))
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._pass(batches, forward_only=False)
        self._refuse_non_finite(reports, batches)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise DSparkError(
                f"step {self.step + 1} has a gradient that is not finite; lower the learning rate or look at the data "
                f"(samples {[name for batch in batches for name in batch.sample_ids]})"
            )
        self.scheduler.step(increment=1)
        return reports, sum(batch.num_tokens for batch in batches), float(grad_norm)

    def _pass(self, batches: list[MicroBatch], forward_only: bool) -> list[dict[str, torch.Tensor]]:
        return self.forward_backward(
            forward_step_func=forward_step_dspark,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=self.settings.max_length,
            micro_batch_size=self.settings.micro_batch_size,
            forward_only=forward_only,
        )

    def _refuse_non_finite(self, reports: list[dict[str, torch.Tensor]], batches: list[MicroBatch]) -> None:
        for report, batch in zip(reports, batches, strict=True):
            if not torch.isfinite(report["loss"]).all():
                raise DSparkError(
                    f"the loss of step {self.step + 1} on rank {torch.distributed.get_rank()} is not finite "
                    f"(samples {batch.sample_ids}); look at these samples, or lower the learning rate"
                )

    def validate(self) -> dict[str, float]:
        """Evaluate on the held-out samples with their fixed anchors, and log."""
        if not self.held_out:
            return {}
        started = time.perf_counter()
        self.model.eval()
        with torch.no_grad():
            reports = self._pass(self.held_out, forward_only=True)
        self.model.train()
        metrics = reduce_report(reports, self.groups.dp)
        metrics["seconds"] = time.perf_counter() - started
        self.reporter.log("validation", self.step, metrics)
        return metrics

    def _log_window(
        self, window: list[dict[str, torch.Tensor]], tokens: int, seconds: float, grad_norm: float, rate: float
    ) -> dict[str, float]:
        metrics = reduce_report(window, self.groups.dp)
        all_tokens = torch.tensor([tokens], dtype=torch.float64, device=platform.device())
        torch.distributed.all_reduce(all_tokens, group=self.groups.dp)
        steps = len(window) // self.sampler.num_micro_batches
        metrics.update(
            grad_norm=grad_norm,
            learning_rate=max(group["lr"] for group in self.optimizer.param_groups),
            tokens_per_second=float(all_tokens) / seconds,
            step_seconds=seconds / steps,
            peak_memory_gib=peak_memory_bytes() / 2**30,
        )
        self.reporter.log("train", self.step, metrics, seconds_left=rate * (self.settings.steps - self.step))
        return metrics

    def save(self) -> Path:
        """Publish a checkpoint of the current step."""
        run = {
            "settings": self.settings.as_dict(),
            "model": self.config.as_dict(),
            "progress": {"step": self.step, "consumed_samples": self.step * self.settings.global_batch_size},
        }
        return save_checkpoint(self.settings.output, self.step, self.module, self.optimizer, self.scheduler, run)


def build_training(
    settings: TrainSettings, config: DSparkModelConfig, groups: ProcessGroupCollection
) -> tuple[Any, Any, OptimizerParamScheduler]:
    """Return the wrapped model, Megatron-Core's optimizer and its schedule."""
    optimizer_settings = settings.optimizer
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=optimizer_settings.distributed
    )
    (model,) = DSparkModelBuilder(config).build_distributed_models(
        groups, ddp_config=ddp, mixed_precision_wrapper=Float16Module, data_parallel_random_init=False
    )
    weighted = config.loss_normalizer == "weights"
    config.transformer.finalize_model_grads_func = (
        FractionalDivisor(finalize_model_grads) if weighted else finalize_model_grads
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optimizer_settings.learning_rate,
            min_lr=optimizer_settings.min_learning_rate,
            weight_decay=optimizer_settings.weight_decay,
            adam_beta1=optimizer_settings.adam_beta1,
            adam_beta2=optimizer_settings.adam_beta2,
            adam_eps=optimizer_settings.adam_eps,
            clip_grad=optimizer_settings.clip_grad,
            bf16=settings.precision == "bf16",
            fp16=settings.precision == "fp16",
            params_dtype=config.transformer.params_dtype,
            use_distributed_optimizer=optimizer_settings.distributed,
        ),
        [model],
        pg_collection=groups,
    )
    config.transformer.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optimizer_settings.learning_rate,
        min_lr=optimizer_settings.min_learning_rate,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.steps,
        lr_decay_style=optimizer_settings.decay_style,
        start_wd=optimizer_settings.weight_decay,
        end_wd=optimizer_settings.weight_decay,
        wd_incr_steps=settings.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return model, optimizer, scheduler


@contextlib.contextmanager
def process_groups(tensor_parallel_size: int, seed: int) -> Iterator[ProcessGroupCollection]:
    """Start torch.distributed (torchrun's ranks, or one) and Megatron-Core's groups; end them afterwards.

    A job that already has a process group keeps it.
    """
    platform.prepare()
    ours = not torch.distributed.is_initialized()
    with tempfile.TemporaryDirectory(prefix="dspark-") as folder:
        if ours:
            if platform.has_cuda():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            alone = "WORLD_SIZE" not in os.environ
            torch.distributed.init_process_group(
                platform.communication_backend(),
                **(dict(init_method=f"file://{folder}/store", rank=0, world_size=1) if alone else {}),
            )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        try:
            yield ProcessGroupCollection.use_mpu_process_groups()
        finally:
            parallel_state.destroy_model_parallel()
            if ours:
                torch.distributed.destroy_process_group()


def _sampler(settings: TrainSettings, samples: list[ChatSample], rank: int, size: int) -> Sampler:
    return Sampler(
        samples,
        num_anchors=settings.num_anchors,
        micro_batch_size=settings.micro_batch_size,
        global_batch_size=settings.global_batch_size,
        seed=settings.seed,
        data_parallel_rank=rank,
        data_parallel_size=size,
    )


def _read_data(settings: TrainSettings, target: TargetConfig) -> tuple[list[ChatSample], list[ChatSample]]:
    samples = load_samples(settings.data, target.folder, settings.max_length)
    held_out = load_samples(settings.validation, target.folder, settings.max_length) if settings.validation else []
    return samples, held_out


def _check_resumable(settings: TrainSettings, checkpoint: Checkpoint, resume: bool) -> None:
    if not resume:
        raise DSparkError(
            f"{settings.output} already has a checkpoint of step {checkpoint.step}; resume it, or choose another output"
        )
    if checkpoint.step > settings.steps:
        raise DSparkError(
            f"{settings.output} is already at step {checkpoint.step} and the run is to end at {settings.steps}; raise "
            "steps or choose another output"
        )
    saved = checkpoint.run["settings"]
    free = {"output", "steps", "log_interval", "validation_interval", "validation_samples", "save_interval"}
    free |= {"tensorboard", "validation", "parallel", "micro_batch_size", "recompute"}
    for name, value in settings.as_dict().items():
        if name not in free and saved.get(name) != value:
            raise DSparkError(
                f"{name} was {saved.get(name)!r} in the checkpoint of step {checkpoint.step} and is now {value!r}, "
                "which would change the result; restore it, or choose another output"
            )
