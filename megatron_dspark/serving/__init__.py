"""The reference verifier: decode with an exported drafter and prove that the target's output does not change.

It reads files only (an exported draft folder and the target's Hugging Face folder), with plain PyTorch and
transformers, and shares no code with the training model: a difference between training and serving cannot hide in
code that both use. Start reading at `verify.py` (one request, draft and verify) and `harness.py` (the measurement).
"""
