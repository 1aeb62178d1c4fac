"""Hugging Face in and out: layouts, config, mapping, export, reading and linting a draft's folder."""
