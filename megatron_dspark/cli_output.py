"""What every verb of the command line shares: standard output is for results, and one rank alone speaks."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from megatron_dspark.files import json_text

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on standard output.")]


def verb(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a function to `app`, by its name without underscores at the end.

    What the libraries below print while it runs goes to standard error, which is not where results are.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @app.command(name=function.__name__.rstrip("_"))
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> None:
            with contextlib.redirect_stdout(sys.stderr):
                function(*arguments, **options)

        return run

    return add


def is_first_rank() -> bool:
    """Return whether this is rank 0 of torchrun's, or the only process: all ranks come to the same result."""
    return os.environ.get("RANK", "0") == "0"


def show(report: Any, as_json: bool) -> None:
    """Print a report on standard output, as a table or as one JSON object; of several ranks the first one does."""
    if not is_first_rank():
        return
    if as_json:
        print(json_text(report.as_dict()), file=sys.__stdout__)
    else:
        Console(file=sys.__stdout__).print(report.render())
