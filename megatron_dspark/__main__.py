"""`python -m megatron_dspark`, which is also how torchrun starts the command line."""

from megatron_dspark.cli import main

if __name__ == "__main__":
    main()
