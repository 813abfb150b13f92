"""`adaptree top`: the live state of a server in the terminal, read from its feed."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_URL: Final = "http://127.0.0.1:8000"
_FEED: Final = "/adaptree/feed"
_TIMEOUT: Final = httpx.Timeout(5, read=15)
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 60  # seconds
_CURVE: Final = 36  # of which are drawn in a terminal of 80 columns
_SHOWN_EVENTS: Final = 6
_CURVES: Final = {"tau": 2, "tokens_per_second": 1, "budget": 1, "running": 0, "waiting": 0}  # decimals by name
_REFUSALS: Final = {
    401: "the server at {url} requires an API key: set it with --key",
    403: "the server does not answer to the name in {url}: add it to its allowed_hosts",
}

Json = dict[str, Any]


def top(
    url: Annotated[str, typer.Option(help="Address of the server.")] = _URL,
    key: Annotated[str | None, typer.Option(help="API key, if the server's metrics are closed.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one moment and exit.")] = False,
) -> None:
    """Show the live state of a server until interrupted."""
    try:
        show(url.rstrip("/"), key, once=once)
    except NoFeedError as error:
        Console(stderr=True).print(f"adaptree top: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        return


def show(url: str, key: str | None, *, once: bool) -> None:
    """Show a server's feed until it ends, or one moment of it. Raises NoFeedError."""
    screen = Screen(url)
    with Live(Text(f"connecting to {url}"), auto_refresh=False, screen=not once) as live:
        for name, data in moments(url, key):
            screen.update(name, data)
            if name != "past":
                live.update(screen.drawn(), refresh=True)
                if once:
                    return
    raise NoFeedError(f"the server at {url} has ended its feed: it is shutting down")


class Screen:
    """The data received so far, and its display."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._points: list[Json] = []
        self._events: list[Json] = []
        self._moment: Json = {}

    def update(self, name: str, data: Json) -> None:
        """Add an event of the feed."""
        if name == "past":
            self._points, self._events = data["points"], data["events"]
            return
        self._moment = data
        self._points = [*self._points, data][-_WIDTH:]
        self._events = [*self._events, *data["events"]][-_SHOWN_EVENTS:]

    def drawn(self) -> Group:
        """The display of the latest moment."""
        moment = self._moment
        title = Text.assemble(("adaptree", "bold"), f"  {self.url}  ", (moment["state"], "green"))
        learning = moment["learning"]
        rest = [Text("\nnot learning", style="dim")] if learning is None else [_arms(learning), self._happened()]
        off = [Text(f"switched off after errors: {', '.join(moment['switched_off'])}", style="red")]
        return Group(title, *off[: len(moment["switched_off"])], self._figures(), *rest)

    def _figures(self) -> Table:
        moment = self._moment
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, digits in _CURVES.items():
            reason = f" ({moment['budget_reason']})" if name == "budget" and moment["budget_reason"] else ""
            curve = self._curve(name, floor=1 if name == "tau" else 0)
            table.add_row(name.replace("_per_second", "/s"), _number(moment[name], digits) + reason, curve)
        table.add_row("KV cache used", f"{moment['slots_used_share']:.0%}", "")
        if (drafting := moment["drafting"]) is not None:
            gain = f"{_number(drafting['gain'], 2)} ± {_number(drafting['gain_sd'], 2)} plain steps"
            table.add_row("drafting gains", gain, f"may still lose {_number(drafting['balance_seconds'], 2)} s")
        if speed := self._against_plain():
            table.add_row("speed-up", speed, "against plain decoding in the last minute")
        if (memory := moment["memory"]) is not None:
            stored = f"{memory['remembered_tokens']:,} tokens stored, {memory['used_share']:.0%} full"
            table.add_row("past answers", stored, self._from_memory())
        return table

    def _against_plain(self) -> str:
        """Speed relative to plain decoding in the last minute."""
        known = [one for point in self._points if (one := point.get("against_plain")) is not None]
        seconds, plain = (sum(one[name] for one in known) for name in ("seconds", "plain_seconds"))
        return f"{plain / seconds:.2f}" if seconds else ""

    def _from_memory(self) -> str:
        """The memory's share of accepted tokens in the last minute."""
        accepted: Counter[str] = Counter()
        for point in self._points:
            accepted.update(point["accepted_by_source"])
        total = accepted.total()
        return f"{accepted['memory'] / total:.0%} of accepted tokens come from the memory" if total else ""

    def _curve(self, name: str, floor: float = 0.0) -> str:
        """The last seconds as a row of block characters; a blank where there is no value."""
        values = [point[name] for point in self._points[-_CURVE:]]
        span = max([value - floor for value in values if value is not None], default=0.0) or 1.0
        heights = [None if value is None else int((value - floor) / span * len(_BLOCKS)) for value in values]
        return "".join(" " if height is None else _BLOCKS[min(max(height, 0), 7)] for height in heights)

    def _happened(self) -> Text:
        lines = [f"{event['kind']} ({event['reason']}), version {event['version']}" for event in self._events]
        return Text("\n".join(["", *lines[-_SHOWN_EVENTS:]]), style="dim")


def _arms(learning: Json) -> Group:
    doing = "paused" if learning["paused"] else "learning"
    if learning["phase"] == "collecting":
        doing += f", making a drafter ({learning['collected_positions']} of {learning['wanted_positions']} positions)"
    counts = f"{learning['publishes']} published, {learning['refusals']} refused, {learning['rollbacks']} rolled back"
    table = Table(box=None)
    for column in ("arm", "value", "waiting", "updates"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in learning["waiting"]:
        value = _number(learning["values"].get(arm), 4)
        table.add_row(arm, value, str(learning["waiting"][arm]), str(learning["updates"].get(arm, 0)))
    return Group(Text(f"\n{doing}, drafter version {learning['version']}; {counts}"), table)


def _number(value: float | str | None, digits: int) -> str:
    """A number of the feed, which sends infinities as strings."""
    return "-" if value is None else f"{float(value):.{digits}f}"


class NoFeedError(Exception):
    """There is no feed; the message says why and what to do."""


def moments(url: str, key: str | None) -> Iterator[tuple[str, Json]]:
    """Yield the events of a server's feed with their names. Raises NoFeedError."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with httpx.stream("GET", url + _FEED, headers=headers, timeout=_TIMEOUT) as response:
            if response.status_code != 200:
                other = f"the server at {url} has no feed (status {response.status_code}): is it adaptree?"
                raise NoFeedError(_REFUSALS.get(response.status_code, other).format(url=url))
            name = "moment"
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))
                    name = "moment"
    except httpx.ReadTimeout:
        raise NoFeedError(f"the server at {url} stopped responding") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem = f"no server answers at {url} ({error or type(error).__name__})"
        raise NoFeedError(f"{problem}: start one with `adaptree serve`, or set its address with --url") from None
