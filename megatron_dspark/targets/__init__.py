"""Targets that come with the project: small language models that need no download from a model hub."""
