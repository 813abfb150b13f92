"""A process that reads what a server shows, as Prometheus and an open page do: /metrics once a second, and the feed.

Standard library only, so that it takes little from the server beside it."""

import json
import sys
import threading
import time
import urllib.request

_SCRAPE_SECONDS = 1.0
_PATIENCE_SECONDS = 30


class Reader:
    """Counts of what was read so far."""

    def __init__(self, url: str) -> None:
        self.scrapes = 0
        self.moments = 0
        self._url = url
        self._both = threading.Barrier(3)

    def start(self) -> None:
        """Return once both have answered."""
        for read in (self._scrape, self._follow):
            threading.Thread(target=read, daemon=True).start()
        self._both.wait(_PATIENCE_SECONDS)

    def _scrape(self) -> None:
        while True:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_PATIENCE_SECONDS) as page:
                page.read()
            self.scrapes += 1
            if self.scrapes == 1:
                self._both.wait()
            time.sleep(_SCRAPE_SECONDS)

    def _follow(self) -> None:
        with urllib.request.urlopen(f"{self._url}/adaptree/feed", timeout=_PATIENCE_SECONDS) as feed:
            for line in feed:
                self.moments += line.startswith(b"data:")
                if self.moments == 1 and line.startswith(b"data:"):
                    self._both.wait()


def main(url: str) -> None:
    """Read until standard input ends."""
    reader = Reader(url)
    reader.start()
    print("reading", flush=True)
    sys.stdin.read()
    print(json.dumps({"scrapes": reader.scrapes, "moments": reader.moments}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
