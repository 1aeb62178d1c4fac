"""The draft, built from Megatron-Core's parallel parts."""
