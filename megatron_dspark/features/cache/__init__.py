"""The offline feature cache: what the frozen target gives is computed once and read by any number of training runs.

schema (the manifest), shard (one file of whole samples), encoding (stored types), plan (which samples make a shard),
writer (whole shards, resumed), reader (random access, nothing unchecked), feed (background reading for training),
precompute (the job), source (where features come from), verify (checking, showing), reshape (merge, subset).
docs/cache-format.md says what every byte means.
"""
