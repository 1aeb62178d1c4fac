"""Merging and taking parts: the result is the cache that precompute would have made."""

from pathlib import Path

import pytest
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.reader import FeatureCache
from megatron_dspark.features.cache.reshape import merge_caches, subset_cache
from megatron_dspark.features.cache.verify import verify_cache
from tests.cache_support import HIDDEN, RandomCache, tree


def test_merge(tmp_path: Path) -> None:
    one = RandomCache(tmp_path / "one", count=5).write()
    two = RandomCache(tmp_path / "two", count=4, seed=1, prefix="t").write()
    report = merge_caches([one.folder, two.folder], tmp_path / "both")
    assert report.samples == 9 and verify_cache(tmp_path / "both").problems == []
    both = FeatureCache(tmp_path / "both")
    assert both.sample_ids == one.ids + two.ids
    for part in (one, two):
        for mine, theirs in zip(
            FeatureCache(part.folder).features(part.ids[3]), both.features(part.ids[3]), strict=True
        ):
            assert torch.equal(mine, theirs)
    with pytest.raises(DSparkError, match=r"sample 's0' is in .*one and in .*both"):
        merge_caches([one.folder, tmp_path / "both"], tmp_path / "more")
    other = RandomCache(tmp_path / "other", dtype="float32").write()
    with pytest.raises(DSparkError, match=r"features.hidden_dtype .* is 'float32' and .*one has 'bfloat16'"):
        merge_caches([one.folder, other.folder], tmp_path / "more")
    with pytest.raises(DSparkError, match="at least two"):
        merge_caches([one.folder], tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_subset_of_samples_and_taps(tmp_path: Path) -> None:
    whole = RandomCache(tmp_path / "whole", dtype="float8_e4m3fn").write()
    subset_cache(whole.folder, tmp_path / "first", first=5)
    # Random lengths and contents of the first five are the same in a cache of five.
    assert verify_cache(tmp_path / "first").problems == []
    assert FeatureCache(tmp_path / "first").sample_ids == whole.ids[:5]
    (tmp_path / "ids").write_text("s7\ns2\n")
    subset_cache(whole.folder, tmp_path / "part", ids=tmp_path / "ids", taps=[3])
    part = FeatureCache(tmp_path / "part")
    assert part.sample_ids == ["s2", "s7"] and part.manifest.features.target_layer_ids == [3]
    ids, taps, final_hidden = FeatureCache(whole.folder).features("s7")
    mine = part.features("s7")
    assert torch.equal(mine[0], ids) and torch.equal(mine[2], final_hidden)
    assert torch.equal(mine[1], taps[:, HIDDEN:])
    again = tree(tmp_path / "part")
    subset_cache(whole.folder, tmp_path / "part", ids=tmp_path / "ids", taps=[3])
    assert tree(tmp_path / "part") == again
    for options, sentence in (
        ({}, "would be all of it"),
        ({"taps": [2]}, r"taps \[2\] must .* \[1, 3\]"),
        ({"first": 13}, "first is 13 and there are 12"),
    ):
        with pytest.raises(DSparkError, match=sentence):
            subset_cache(whole.folder, tmp_path / "none", **options)
    (tmp_path / "ids").write_text("nobody\n")
    with pytest.raises(DSparkError, match="has no sample 'nobody'"):
        subset_cache(whole.folder, tmp_path / "none", ids=tmp_path / "ids")
    assert not (tmp_path / "none").exists()
