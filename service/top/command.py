"""The command `adaptree top`: its options, and how it ends. Imports nothing heavy before it runs."""

from typing import Annotated, Final

import typer
from rich.console import Console

_URL: Final = "http://127.0.0.1:8000"
_FAILED: Final = 1


def top(
    url: Annotated[str, typer.Option(help="Where the server is.")] = _URL,
    key: Annotated[str | None, typer.Option(help="An API key, where the server closes its metrics.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one moment and end.")] = False,
) -> None:
    """Show the live state of a server until interrupted."""
    from service.top.feed import NoFeedError
    from service.top.screen import show

    try:
        show(url.rstrip("/"), key, once=once)
    except NoFeedError as error:
        Console(stderr=True).print(f"adaptree top: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(_FAILED) from None
    except KeyboardInterrupt:
        return
