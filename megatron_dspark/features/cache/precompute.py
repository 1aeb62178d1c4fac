"""The precompute job: run the frozen target over every conversation once and keep what the draft will need."""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor

from megatron_dspark import platform
from megatron_dspark.config import check_taps, default_target_layer_ids
from megatron_dspark.data.chat import ChatSample, load_tokenizer
from megatron_dspark.data.encoded import EncodedSamples, load_samples
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import StoredTensor, encode, stored_tensors
from megatron_dspark.features.cache.meter import CacheMeter
from megatron_dspark.features.cache.options import PrecomputeOptions
from megatron_dspark.features.cache.plan import ShardPlan, plan_shards
from megatron_dspark.features.cache.schema import (
    LOSS_MASK_RULE,
    SCHEMA,
    TABLES_FILE,
    TARGET_FOLDER,
    DataIdentity,
    FeatureIdentity,
    Manifest,
    TargetIdentity,
    read_manifest,
)
from megatron_dspark.features.cache.shard import GatheredShard, StoredSample
from megatron_dspark.features.cache.source import Capture, megatron_source, transformers_source
from megatron_dspark.features.cache.writer import CacheWriter, WriterBehind
from megatron_dspark.files import atomic_file, existing, require_file, require_writable, save_tensors
from megatron_dspark.parallel_rules import check_target_split
from megatron_dspark.targets.computable import check_computable
from megatron_dspark.targets.fingerprint import (
    chat_template_fingerprint,
    config_fingerprint,
    tokenizer_fingerprint,
)
from megatron_dspark.targets.folder import (
    EMBEDDING,
    LM_HEAD,
    TOKENIZER_FILES,
    TargetConfig,
    frozen_table_bytes,
    read_frozen_tables,
    read_target_config,
)

# Ranks that are done wait for the others this long: a shard takes as long as it takes.
_PATIENCE = datetime.timedelta(days=2)


@dataclass(frozen=True)
class PrecomputeReport:
    """What a job made, or would make.

    Attributes:
        output: the cache.
        samples, tokens, shards: of the whole cache.
        bytes_per_token: of features, ids and mask.
        total_bytes: of the cache (an estimate in a dry run).
        free_bytes: on the disk before.
        seconds: that this call took, 0 where nothing was left to do.
        tokens_per_second: captured and written by this call over all ranks.
        state: "dry run", "written" or "already complete".
    """

    output: str
    samples: int
    tokens: int
    shards: int
    bytes_per_token: int
    total_bytes: int
    free_bytes: int
    seconds: float
    tokens_per_second: float
    state: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(self.__dict__)

    def render(self) -> Table:
        """As a table."""
        table = Table("feature cache", self.output, title_justify="left")
        table.add_row("state", self.state)
        table.add_row("samples, tokens, shards", f"{self.samples:,}, {self.tokens:,}, {self.shards:,}")
        table.add_row("bytes a token", f"{self.bytes_per_token:,}")
        table.add_row("total", decimal(self.total_bytes))
        table.add_row("free on its disk before", decimal(self.free_bytes))
        if self.seconds:
            table.add_row("took", f"{self.seconds:,.0f} s, {self.tokens_per_second:,.0f} tokens/s")
        return table


@dataclass(frozen=True)
class _Job:
    """What is known before any process group, model or file is made."""

    options: PrecomputeOptions
    target: TargetConfig
    taps: list[int]
    samples: EncodedSamples
    tensors: list[StoredTensor]
    plan: ShardPlan
    manifest: Manifest

    def agreed(self) -> dict[str, Any]:
        """Return what every rank must mean alike, by name."""
        options = {name: str(getattr(self.options, name)) for name in ("output", "tensor", "pipeline")}
        parts = {"target": self.manifest.target, "features": self.manifest.features, "data": self.manifest.data}
        identity = {f"{part}.{name}": value for part, values in parts.items() for name, value in vars(values).items()}
        return {**options, **identity, "the number of shards": self.plan.num_shards}

    def report(self, state: str, free: int, total: int, seconds: float = 0.0, done: int = 0) -> PrecomputeReport:
        data = self.manifest.data
        return PrecomputeReport(
            output=str(self.options.output),
            samples=data.samples,
            tokens=data.tokens,
            shards=self.plan.num_shards,
            bytes_per_token=self.plan.bytes_per_token,
            total_bytes=total,
            free_bytes=free,
            seconds=seconds,
            tokens_per_second=done / seconds if seconds else 0.0,
            state=state,
        )


def precompute(options: PrecomputeOptions) -> PrecomputeReport:
    """Write a feature cache, go on with an interrupted one, or report a finished one.

    Under torchrun every rank calls this; they share the output's file system. Shards are dealt to data-parallel ranks
    in turn, every sample is captured alone, and so the bytes do not depend on the number of ranks.

    Raises:
        DSparkError: something is missing or does not fit, or the disk is too small or read-only: before any process
            group, model or file is made. Later: another job writes there, or the disk is full.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    options.validate(world_size)
    job = _prepare(options)
    writer = CacheWriter(options.output, job.manifest, job.plan, job.tensors)
    complete = writer.check()
    free = _free_bytes(options.output)
    total = job.plan.total_bytes + _table_bytes(job)
    if complete:
        if rank == 0:
            writer.tidy()
        made = read_manifest(options.output)
        return job.report("already complete", free, sum(part.bytes for part in (*made.shards, *made.files)))
    require_writable(options.output, "the cache")
    present = writer.present_bytes()
    if total - present > free:
        raise DSparkError(
            f"the cache needs {decimal(total)} ({job.plan.bytes_per_token:,} bytes for each of "
            f"{job.manifest.data.tokens:,} tokens) and the disk of {options.output} has {decimal(free)} free"
            f"{f' beside the {decimal(present)} that are done' if present else ''}; free some space, choose "
            "fewer taps or samples, or store bfloat16 or float8_e4m3fn"
        )
    if options.dry_run:
        return job.report("dry run", free, total)
    from megatron_dspark.parallel import process_groups

    with process_groups(options.tensor, seed=0, pipeline_parallel_size=options.pipeline, agreed=job.agreed()) as groups:
        return _run(job, writer, groups, free)


def _prepare(options: PrecomputeOptions) -> _Job:
    target = read_target_config(options.target, any_architecture=options.source == "hf")
    taps = list(options.target_layer_ids or default_target_layer_ids(target.num_layers))
    check_taps(taps, target.num_layers, allow_unservable=options.allow_unservable_taps)
    if options.source != "hf":
        check_computable(target)
    check_target_split(target, options.tensor, options.pipeline)
    require_file(options.data, "the data", "make it with megatron-dspark prepare")
    samples = load_samples(options.data, options.target, options.max_length)
    tokenizer = load_tokenizer(options.target)
    identifier, revision = _name_of(options.target)
    tensors = stored_tensors(options.dtype, len(taps), target.hidden_size)
    lengths = samples.lengths
    manifest = Manifest(
        schema=SCHEMA,
        complete=False,
        target=TargetIdentity(
            id=identifier,
            revision=revision,
            architecture=target.architecture,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            weights_fingerprint=target.weights_fingerprint(),
            config_fingerprint=config_fingerprint(target.raw),
            tokenizer_fingerprint=tokenizer_fingerprint(options.target, tokenizer),
            chat_template_fingerprint=chat_template_fingerprint(tokenizer),
        ),
        features=FeatureIdentity(
            target_layer_ids=taps,
            hidden_dtype=options.dtype,
            compute_dtype=str(options.compute_dtype),
            source=options.source,
            device=platform.device().type,
            tensor_parallel=options.tensor,
        ),
        data=DataIdentity(
            fingerprint=samples.fingerprint,
            loss_mask_rule=LOSS_MASK_RULE,
            max_length=options.max_length,
            anchor_seed=None,
            block_size=None,
            samples=len(samples),
            tokens=sum(lengths),
            loss_tokens=samples.loss_tokens,
        ),
        created_with={
            name: importlib.metadata.version(name)
            for name in ("megatron-dspark", "megatron-core", "torch", "transformers", "safetensors")
        },
        files=[],
        shards=[],
    )
    plan = plan_shards(lengths, tensors, options.shard_mib)
    return _Job(options, target, taps, samples, tensors, plan, manifest)


def _run(job: _Job, writer: CacheWriter, groups: Any, free: int) -> PrecomputeReport:
    waiting = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        with contextlib.ExitStack() as held:
            with _shared_problem(waiting):
                if torch.distributed.get_rank() == 0:
                    held.enter_context(writer.alone())
            return _write(job, writer, groups, waiting, free)
    finally:
        # It has threads of its own, which would stay in a process that goes on to train.
        torch.distributed.destroy_process_group(waiting)


def _write(job: _Job, writer: CacheWriter, groups: Any, waiting: Any, free: int) -> PrecomputeReport:
    options, rank = job.options, torch.distributed.get_rank()
    dtype = getattr(torch, str(options.compute_dtype))
    if options.source == "hf":
        capture, tables = transformers_source(options.target, job.taps, dtype)
        # As the target stores them, where they have the usual names; else as transformers loaded them.
        with contextlib.suppress(DSparkError):
            tables = read_frozen_tables(job.target)
    else:
        capture = megatron_source(job.target, job.taps, dtype, groups, options.tensor, options.pipeline)
        tables = read_frozen_tables(job.target)
    done, mine = 0, []
    meter = CacheMeter(job.plan, options.output, active=rank == 0)
    with _shared_problem(waiting):
        if rank == 0:
            writer.begin(_files(job, tables))
    with _shared_problem(waiting):
        # All ranks of a replica look before any of them writes, and so see the same.
        mine = writer.missing(groups.dp.rank(), groups.dp.size())
    with _shared_problem(waiting):
        meter.begin(mine)
        with meter, WriterBehind(writer) as behind:
            for number in mine:
                # A replica's ranks capture together: each learns of a problem of the one that writes.
                with _shared_problem(groups.mp):
                    shard = _gather_shard(job, number, capture, writer, meter, groups)
                    if shard is not None:
                        behind.write(number, shard)
                        done += int(shard.offsets[-1])
    with _shared_problem(waiting):
        if rank == 0:
            writer.finish()
    counted = torch.tensor([done], dtype=torch.int64)
    torch.distributed.all_reduce(counted, group=waiting)
    made = read_manifest(options.output)
    total = sum(part.bytes for part in (*made.shards, *made.files))
    return job.report("written", free, total, meter.seconds, int(counted))


@contextlib.contextmanager
def _shared_problem(group: Any) -> Iterator[None]:
    """Let every rank leave the block together; a refusal of any of them is everybody's.

    The command line prints the first rank's sentence alone, and a rank that went on would wait for the others.
    """
    problem = None
    try:
        yield
    except (DSparkError, OSError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(problems, problem, group=group)
    for found in problems:
        if found is not None:
            raise DSparkError(found)


def _gather_shard(
    job: _Job, number: int, capture: Capture, writer: CacheWriter, meter: CacheMeter, groups: Any
) -> GatheredShard | None:
    """Capture a shard's samples; the first tensor-parallel rank of the last stage gets them all."""
    left = iter([job.samples[index] for index in job.plan.samples(number)])

    def capture_only() -> None:
        for sample in left:
            capture(sample.input_ids)
            meter.sample(len(sample.input_ids))

    if groups.tp.rank() > 0 or groups.pp.rank() < groups.pp.size() - 1:
        capture_only()
        return None
    try:
        return writer.gather(number, _stored(job, left, capture, meter))
    except (DSparkError, OSError):
        # The other ranks of the replica wait for this one's part of every sample.
        if groups.mp.size() > 1:
            capture_only()
        raise


def _stored(job: _Job, left: Iterator[ChatSample], capture: Capture, meter: CacheMeter) -> Iterator[StoredSample]:
    for sample in left:
        taps, final_hidden = capture(sample.input_ids)
        yield store(sample, taps, final_hidden, job.options.dtype, job.target.hidden_size)
        meter.sample(len(sample.input_ids))


def store(sample: ChatSample, taps: Tensor, final_hidden: Tensor, hidden_dtype: str, hidden_size: int) -> StoredSample:
    """Return a sample as it is stored.

    Raises:
        DSparkError: a feature is not finite, which no draft could be trained on.
    """
    stored: dict[str, Tensor] = {"input_ids": sample.input_ids.to(torch.int32), "loss_mask": sample.loss_mask}
    for name, rows in (("taps", taps), ("final_hidden", final_hidden)):
        if not bool(torch.isfinite(rows).all()):
            raise DSparkError(
                f"the target gives {name} that are not finite for sample {sample.sample_id!r}; look at that sample, or "
                "run the target in another compute_dtype"
            )
        parts = encode(name, rows, hidden_dtype, hidden_size)
        stored.update({part: values.cpu() for part, values in parts.items()})
    return StoredSample(sample.sample_id, stored)


def _files(job: _Job, tables: dict[str, Tensor]) -> dict[str, Callable[[Path], None]]:
    """What travels with the shards: the target's config, tokenizer, embedding and LM head."""
    folder, tied = job.options.target, job.target.tie_word_embeddings
    kept = {EMBEDDING: tables["embed_tokens"], **({} if tied else {LM_HEAD: tables["lm_head"]})}

    def write_config(path: Path) -> None:
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(job.target.raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def write_tables(path: Path) -> None:
        with atomic_file(path) as temporary:
            save_tensors({name: table.contiguous() for name, table in kept.items()}, temporary)

    def copy(source: Path, path: Path) -> None:
        with atomic_file(path) as temporary:
            shutil.copyfile(source, temporary)

    files: dict[str, Callable[[Path], None]] = {
        f"{TARGET_FOLDER}/config.json": write_config,
        f"{TARGET_FOLDER}/{TABLES_FILE}": write_tables,
    }
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            files[f"{TARGET_FOLDER}/{name}"] = functools.partial(copy, folder / name)
    return files


def _name_of(folder: Path) -> tuple[str, str | None]:
    """Name and revision of a target; both stand in the path inside Hugging Face's own cache."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/"), folder.name
    return folder.name, None


def _table_bytes(job: _Job) -> int:
    if stored := frozen_table_bytes(job.target):
        return stored
    # Tensors of other names: they are written as the target runs.
    tables = 1 if job.target.tie_word_embeddings else 2
    width = getattr(torch, str(job.options.compute_dtype)).itemsize
    return tables * job.target.vocab_size * job.target.hidden_size * width


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(existing(folder)).free
