"""`adaptree ingress`."""

from typing import Annotated, Final

import typer

_HOST: Final = "127.0.0.1"
_PORT: Final = 8080


def ingress(
    replicas: Annotated[str, typer.Option(metavar="URL,...", help="Addresses of the servers, separated by commas.")],
    host: Annotated[str, typer.Option(help="Address to listen on. Keys are checked by the servers.")] = _HOST,
    port: Annotated[int, typer.Option(help="Port to listen on. 0 takes a free one.", min=0, max=65535)] = _PORT,
) -> None:
    """Be one address for several servers of the same model; streams go on where one of them ends."""
    from service.ingress.app import serve
    from service.logging import configure_logging

    configure_logging("info", as_json=False)
    serve(replicas.split(","), host, port)
