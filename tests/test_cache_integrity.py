"""A damaged, swapped, edited or foreign cache is refused with a sentence, and the sentence says what differs."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache import shard as shard_files
from megatron_dspark.features.cache.reader import FeatureCache
from megatron_dspark.features.cache.schema import MANIFEST_FILE, SELF_DIGEST
from megatron_dspark.features.cache.verify import verify_cache
from megatron_dspark.targets.fingerprint import digest_of
from tests.cache_support import HIDDEN, TAPS, RandomCache, tree


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RandomCache:
    return RandomCache(tmp_path_factory.mktemp("made") / "cache").write()


def read_all(folder: Path, **options: Any) -> None:
    """Open a cache and read every sample, as a run does."""
    read_all_of(FeatureCache(folder, **options))


def read_all_of(cache: FeatureCache) -> None:
    for sample_id in cache.sample_ids:
        cache.features(sample_id)


def copied(made: RandomCache, folder: Path) -> Path:
    shutil.copytree(made.folder, folder)
    return folder


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float8_e4m3fn"))
def test_what_is_read_is_what_was_written(dtype: str, tmp_path: Path) -> None:
    source = RandomCache(tmp_path / "cache", dtype=dtype).write()
    cache = FeatureCache(source.folder)
    assert len(cache.manifest.shards) > 1 and len(cache) == 12
    exact = RandomCache(tmp_path / "none", dtype="float32")
    for number in (11, 0, 7):
        ids, taps, final_hidden = cache.features(source.ids[number])
        stored, wanted = source.content(number), exact.content(number)
        assert torch.equal(ids, stored["input_ids"].long())
        sample = cache.sample(number)
        assert torch.equal(sample.input_ids, ids) and torch.equal(sample.loss_mask, stored["loss_mask"])
        # At most half of the last kept bit: BF16 keeps 8 significant bits, FP8 4.
        bound = {"float32": 0.0, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}[dtype]
        for found, name in ((taps, "taps"), (final_hidden, "final_hidden")):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, wanted[name], rtol=bound, atol=1e-3 if bound else 0.0)
    with safe_open(source.folder / "shard-000000.safetensors", framework="pt") as shard:
        # Any reader of safetensors can look inside.
        assert shard.get_slice("taps").get_shape()[1] == len(TAPS) * HIDDEN
    assert len(cache.samples()[2:5]) == 3 and cache.samples()[2:5][0].sample_id == "s2"
    assert cache.samples().lengths == source.plan.lengths
    assert cache.samples()[7:2:-2].lengths == [source.plan.lengths[number] for number in (7, 5, 3)]


def test_more_shards_than_may_be_open(made: RandomCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read everywhere evict each other's maps; headers are parsed once, when the cache is opened."""
    folder = copied(made, tmp_path / "cache")
    monkeypatch.setattr(shard_files, "most_maps", lambda: 2)
    cache = FeatureCache(folder)
    assert len(cache.manifest.shards) > 2
    monkeypatch.setattr(shard_files.json, "loads", lambda _: pytest.fail("a header was parsed again"))
    with ThreadPoolExecutor(4) as pool:
        for name, (ids, *_) in zip(made.ids * 5, pool.map(cache.features, made.ids * 5), strict=True):
            assert torch.equal(ids, made.content(made.ids.index(name))["input_ids"].long())
    assert len(shard_files._maps) <= 2
    # What takes a shard's place meanwhile is noticed when it is mapped again.
    extend(folder, folder)
    with pytest.raises(DSparkError, match=r"is not a whole shard \(it has \d+ bytes and had \d+ when it was opened"):
        read_all_of(cache)


def test_fp8_halves_the_bytes(tmp_path: Path) -> None:
    sizes = {
        dtype: RandomCache(tmp_path / dtype, dtype=dtype).plan.bytes_per_token
        for dtype in ("bfloat16", "float8_e4m3fn")
    }
    assert sizes["bfloat16"] == 3 * HIDDEN * 2 + 5 and sizes["float8_e4m3fn"] == 3 * HIDDEN + 5 + 3 * 4


def test_number_of_ranks_does_not_show(made: RandomCache, tmp_path: Path) -> None:
    for ranks in (2, 3, 50):
        RandomCache(tmp_path / str(ranks)).write(ranks)
        assert tree(tmp_path / str(ranks)) == tree(made.folder)


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("shard-*.safetensors"))[number]


def flip(where: Callable[[int], int]) -> Callable[[Path, Path], None]:
    def mutate(folder: Path, _other: Path) -> None:
        content = bytearray(shard(folder, 1).read_bytes())
        content[where(len(content))] ^= 1
        shard(folder, 1).write_bytes(content)

    return mutate


def truncate(folder: Path, _other: Path) -> None:
    with open(shard(folder, 2), "rb+") as file:
        file.truncate(shard(folder, 2).stat().st_size - 1)


def extend(folder: Path, _other: Path) -> None:
    with open(shard(folder, 2), "ab") as file:
        file.write(b"\0")


def reorder(folder: Path, _other: Path) -> None:
    """Two shards exchange their names."""
    first, second = shard(folder, 0), shard(folder, 1)
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def rename(folder: Path, _other: Path) -> None:
    shard(folder, 1).rename(folder / "shard-000099.safetensors")


def swap(folder: Path, other: Path) -> None:
    """A shard of another cache of the same identity."""
    shutil.copy(shard(other, 0), shard(folder, 0))


MUTATIONS = [
    pytest.param(flip(lambda size: 3), "not a whole shard|index_sha256", id="flip-length"),
    pytest.param(flip(lambda size: 60), "not a whole shard|index_sha256|identity is", id="flip-header"),
    pytest.param(flip(lambda size: size // 2), r"sample 's\d+' .* was altered: its SHA-256 is", id="flip-feature"),
    pytest.param(flip(lambda size: size - 1), r"sample 's\d+' .* was altered|index_sha256 is", id="flip-end"),
    pytest.param(truncate, r"is truncated: bytes is \d+ and the manifest says \d+", id="truncate"),
    pytest.param(extend, r"is longer than it was: bytes is \d+ and the manifest says \d+", id="extend"),
    pytest.param(reorder, r"bytes is|(samples|tokens|index_sha256) is .* and the manifest says", id="reorder"),
    pytest.param(rename, r"shard-000001.safetensors .* is missing and the manifest says \d+ bytes", id="rename"),
    pytest.param(swap, r"bytes is|index_sha256 is .* and the manifest says", id="swap"),
]


@pytest.mark.parametrize(("mutate", "sentence"), MUTATIONS)
def test_altered_shards_are_refused(
    mutate: Callable[[Path, Path], None], sentence: str, made: RandomCache, tmp_path: Path
) -> None:
    folder = copied(made, tmp_path / "cache")
    read_all(folder)
    mutate(folder, RandomCache(tmp_path / "other", seed=1).write().folder)
    with pytest.raises(DSparkError, match=sentence) as refusal:
        read_all(folder)
    assert "\n" not in str(refusal.value)
    assert verify_cache(folder).problems


def test_every_byte_is_covered(made: RandomCache, tmp_path: Path) -> None:
    """A flip anywhere in a shard is noticed when its samples are read: 64 places over the whole file."""
    folder = copied(made, tmp_path / "cache")
    path = shard(folder, 0)
    content = path.read_bytes()
    for index in range(64):
        place = index * (len(content) - 1) // 63
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        with pytest.raises(DSparkError):
            cache = FeatureCache(folder)
            for number in made.plan.samples(0):
                cache.features(made.ids[number])
    path.write_bytes(content)
    read_all(folder)


def test_same_size_shard_of_another_cache_is_refused(made: RandomCache, tmp_path: Path) -> None:
    """Same samples, same sizes, other features (another target): only the identity tells them apart."""
    folder = copied(made, tmp_path / "cache")
    other = RandomCache(tmp_path / "other")
    other.writer.manifest = _with_target(other.writer.manifest)
    other.write()
    shutil.copy(shard(other.folder, 0), shard(folder, 0))
    with pytest.raises(DSparkError, match="belongs to another cache: identity is"):
        FeatureCache(folder)


def _with_target(manifest: Any) -> Any:
    import dataclasses

    return dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, weights_fingerprint="v"))


def leaves(value: Any, path: tuple = ()) -> list[tuple]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return leaves(value[0], (*path, 0))
    return [path]


def edited(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    return 7 if value is None else [*value, 5] if isinstance(value, list) else value


def test_every_edited_manifest_field_is_refused(made: RandomCache, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "cache")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    expected = {f"target.{name}": value for name, value in manifest["target"].items()}
    expected |= {f"features.{name}": value for name, value in manifest["features"].items()}
    paths = leaves(manifest)
    assert len(paths) > 30 and {path[-1] for path in paths if path[0] == "files"} == {"name", "bytes", "sha256"}
    for path in paths:
        for forged in (False, True):
            changed = json.loads(json.dumps(manifest))
            place = changed
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = edited(place[path[-1]])
            if forged and path != (SELF_DIGEST,):
                # With the digest made to fit, what decides the result is still compared with shards and run.
                unread = path == ("shards", 0, "sha256") or path[0] == "created_with"
                if unread or path[-1] in ("loss_tokens", "fingerprint", "anchor_seed", "block_size"):
                    continue
                changed[SELF_DIGEST] = digest_of({key: value for key, value in changed.items() if key != SELF_DIGEST})
            (folder / MANIFEST_FILE).write_text(json.dumps(changed))
            with pytest.raises(DSparkError) as refusal:
                read_all(folder, expected=expected)
            sentence = str(refusal.value)
            assert "\n" not in sentence, path
            if not forged and path[0] in ("schema", "complete"):
                assert path[0] in sentence
            if forged and path[0] in ("target", "features"):
                assert f"{'.'.join(path)} of the feature cache" in sentence, path
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    read_all(folder, expected=expected)


def test_missing_unknown_and_mistyped_fields_are_named(made: RandomCache, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "cache")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for change, sentence in (
        (lambda m: m["data"].pop("tokens"), "lacks field data.tokens"),
        (lambda m: m.update(extra=1), "unknown field extra"),
        (lambda m: m["data"].update(tokens="7"), "data.tokens of the feature cache .* is '7' and must be int"),
        (lambda m: m.update(schema=2), "schema of the feature cache .* is 2 and this version reads 1"),
        (lambda m: m.update(schema="1"), "schema of the feature cache .* is '1' and this version reads 1"),
        (lambda m: m.update(complete=False), "complete of the feature cache .* is False and must be True"),
    ):
        changed = json.loads(json.dumps(manifest))
        change(changed)
        changed[SELF_DIGEST] = digest_of({key: value for key, value in changed.items() if key != SELF_DIGEST})
        (folder / MANIFEST_FILE).write_text(json.dumps(changed))
        with pytest.raises(DSparkError, match=sentence):
            FeatureCache(folder)
    with pytest.raises(DSparkError, match="is no feature cache"):
        FeatureCache(tmp_path)


def test_verify_says_what_is_wrong(made: RandomCache, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "cache")
    assert verify_cache(folder).problems == []
    flip(lambda size: size // 2)(folder, folder)
    truncate(folder, folder)
    (folder / "notes.txt").write_text("x")
    problems = verify_cache(folder).problems
    assert len(problems) == 3
    assert "SHA-256" in problems[0] and "truncated" in problems[1] and "notes.txt" in problems[2]
