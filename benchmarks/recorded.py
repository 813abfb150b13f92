"""`python -m benchmarks recorded`: the memory without a network against SuffixDecoding (arXiv 2411.04975, by its own
package), on recorded answers.

A simulation without a model: each step proposes a tree, and takes its longest path that stands in the recorded answer,
and the token behind it. Both have seen the answers before this one, and remember the present text. Each plays every
answer with several settings, all of which remember the same; a mean of so many nodes per step is that of the two
settings, one of which a request gets by lot, that need the fewest steps.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Protocol

import numpy as np
import torch
import typer

from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Committed, DraftContext, DraftingSizes, MemorySizes
from drafters.tree import MAX_DEPTH, ROOT, DraftTree, VerifyResult
from service.bench.commands import Out, numbers
from service.bench.conditions import refuse_unwritable, surroundings
from service.bench.experiment import Column, Row, counted, paired_bootstrap, report, table_of
from service.config import LoadedConfig
from service.errors import StartupError
from service.training.regenerate import Response, read_responses

OURS, THEIRS, MIXED = "memory", "SuffixDecoding", "all kinds in one"

Nodes = Sequence[tuple[int, int]]
"""Token and parent of each; ROOT stands for the root."""

_MOST = 64  # nodes of a tree
_SURVIVAL = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.0025)
"""Of ours: nodes that are less likely are left out."""
_THEIRS = tuple(product((0.3, 0.1, 0.03), (1.0, 2.0, 4.0, 8.0, 16.0), (-1.0, 0.0, 2.0)))
"""Of theirs, by default (0.1, 1, 0): least odds of a node, most nodes per token that is matched, and how many more."""
_TREE_DEPTH = 64  # of their trees, by default


class Player(Protocol):
    """Proposes what may follow one text at a time."""

    def start(self, number: int, text: Response) -> None: ...

    def propose(self) -> Nodes:
        """Parents stand before their children."""

    def take(self, tokens: Sequence[int]) -> None: ...


class Ours:
    """All nodes whose survival is at least so much."""

    def __init__(self, least: float, num_bytes: int) -> None:
        memory = MemorySizes(num_bytes=num_bytes)
        sizes = DraftingSizes(max_sequences=1, max_length=8192, max_nodes=_MOST, memory=memory)
        self._drafter, self._rows, self._least = MemoryDrafter(sizes), torch.tensor([0]), least

    def start(self, number: int, text: Response) -> None:
        self._drafter.start([DraftContext(0, text.prompt, warm=text.temperature > 0)])

    def propose(self) -> Nodes:
        tree = self._drafter.recall(self._rows)
        count = int((tree.survival[0] >= self._least).sum())  # they fall
        return list(zip(tree.tokens[0, :count].tolist(), tree.parents[0, :count].tolist(), strict=True))

    def take(self, tokens: Sequence[int]) -> None:
        self._drafter.commit(committed(self._rows, [tokens]))


class Theirs:
    """Trees as their cache makes them. Raises StartupError without their package."""

    def __init__(self, least: float, factor: float, offset: float) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise StartupError("theirs is a package that is not here: pip install arctic-inference") from error
        self._cache, self._least, self._factor, self._offset = SuffixDecodingCache(_TREE_DEPTH), least, factor, offset
        self._number, self._text = -1, np.zeros(0, np.int32)

    def start(self, number: int, text: Response) -> None:
        if self._number >= 0:
            self._cache.stop_request(self._number)
        self._number, self._text = number, np.array(text.prompt, np.int32)
        self._cache.start_request(number, self._text)

    def propose(self) -> Nodes:
        draft = self._cache.speculate(
            self._number,
            self._text,
            max_spec_tokens=_MOST,
            max_spec_factor=self._factor,
            max_spec_offset=self._offset,
            min_token_prob=self._least,
            use_tree_spec=True,
        )
        return list(zip(draft.token_ids, draft.parents, strict=True))

    def take(self, tokens: Sequence[int]) -> None:
        self._text = np.append(self._text, np.array(tokens, np.int32))
        self._cache.add_active_response(self._number, tokens)


def committed(rows: torch.Tensor, lines: Sequence[Sequence[int]]) -> Committed:
    """What was taken, for a drafter that asks for no more than that."""
    longest, none = max(map(len, lines)), torch.zeros(0)
    return Committed(
        rows=rows,
        tokens=torch.tensor([[*line, *[-1] * (longest - len(line))] for line in lines]),
        counts=torch.tensor([len(line) for line in lines]),
        tree=DraftTree.empty(len(lines)),
        result=VerifyResult(none, none, none, none),
        features=None,
        positions=none,
        slots=none,
    )


def accepted(nodes: Nodes, follows: Sequence[int]) -> int:
    """How many tokens of what follows are a path from the root."""
    children = {(parent, token): number for number, (token, parent) in enumerate(nodes)}
    parent = ROOT
    for depth, token in enumerate(follows):
        found = children.get((parent, token))
        if found is None:
            return depth
        parent = found
    return len(follows)


def played(player: Player, texts: Iterable[Response]) -> np.ndarray:
    """Tokens, steps and nodes of each answer. # -> [3, texts]"""
    counts = []
    for number, text in enumerate(texts):
        player.start(number, text)
        done = steps = proposed = 0
        while done < len(text.response):
            nodes = player.propose()
            taken = 1 + accepted(nodes, text.response[done : done + MAX_DEPTH][:-1])
            player.take(text.response[done : done + taken])
            done, steps, proposed = done + taken, steps + 1, proposed + len(nodes)
        counts.append((done, steps, proposed))
    return np.array(counts, float).T


def matched(settings: Sequence[np.ndarray], mean: float) -> np.ndarray:
    """What is expected of two settings by lot, whose mean of nodes per step is this one and that need the fewest steps;
    of the one that comes nearest from below where none has so many. # each [3, texts] -> [3, texts]"""
    over = [counts[2].sum() - mean * counts[1].sum() for counts in settings]
    best = settings[int(np.argmax(over))] if max(over) < 0 else None
    for few, many in product(range(len(settings)), repeat=2):
        if over[few] <= 0 < over[many]:
            share = over[many] / (over[many] - over[few])
            both = share * settings[few] + (1 - share) * settings[many]
            best = both if best is None or both[1].sum() < best[1].sum() else best
    if best is None:
        raise StartupError(f"every setting has more than {mean:g} nodes per step: give other --nodes")
    return best


def row_of(stream: str, mean: float, mine: np.ndarray, others: np.ndarray) -> Row:
    """Tokens per step of both, with the target's own token and without, and the ratios with their intervals over
    requests. # mine, others [3, texts] of the same texts"""
    columns = np.concatenate([mine, others])
    tau = [float(counts[0].sum() / counts[1].sum()) for counts in (mine, others)]
    return {
        "stream": stream,
        "requests": mine.shape[1],
        "tokens": int(mine[0].sum()),
        "mean_nodes": mean,
        "nodes": [float(counts[2].sum() / counts[1].sum()) for counts in (mine, others)],
        "tokens_per_step": tau,
        "accepted_per_step": [one - 1 for one in tau],
        "ratio": paired_bootstrap(lambda sums: sums[4] / sums[1], columns, seed=0),
        "accepted_ratio": paired_bootstrap(
            lambda sums: (sums[0] / sums[1] - 1) / (sums[3] / sums[4] - 1), columns, seed=0
        ),
    }


def run(
    loaded: LoadedConfig,
    responses: Annotated[
        list[Path], typer.Option("--responses", metavar="FILE", help="JSONL file of `adaptree train regenerate`.")
    ],
    nodes: Annotated[str, typer.Option(metavar="N,...", help="Mean nodes per step of both.")] = "4,8,16",
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first so many requests of each kind.")] = None,
    out: Out = None,
) -> bool:
    """Tokens per step of the memory alone against SuffixDecoding, without a model: recorded answers by kind, each
    kind for itself and all in one."""
    refuse_unwritable(out)
    torch.set_num_threads(1)
    streams = defaultdict[str, list[Response]](list)
    for text in read_responses(responses):
        if limit is None or len(streams[text.task]) < limit:
            streams[text.task].append(text)
            streams[MIXED].append(text)
    settings: dict[str, list[Callable[[], Player]]] = {
        OURS: [partial(Ours, least, loaded.config.memory_bytes) for least in _SURVIVAL],
        THEIRS: [partial(Theirs, *one) for one in _THEIRS],
    }
    means, rows, curves = numbers(nodes, "--nodes"), list[Row](), {}
    with counted(len(streams) * (len(_SURVIVAL) + len(_THEIRS)), "settings") as advance:
        for stream, texts in streams.items():
            counts: dict[str, list[np.ndarray]] = {name: [] for name in settings}
            for name, make in ((name, make) for name, made in settings.items() for make in made):
                counts[name].append(played(make(), texts))
                advance(1)
            rows += [row_of(stream, mean, *(matched(found, mean) for found in counts.values())) for mean in means]
            curves[stream] = {name: sorted(map(_point, found)) for name, found in counts.items()}
    kinds_only = [row for row in rows if row["stream"] != MIXED]
    summary = {
        "by_mean_nodes": {
            str(mean): {
                key: geometric_mean(row[key][0] for row in kinds_only if row["mean_nodes"] == mean) for key in _RATIOS
            }
            for mean in means
        },
        "nodes_and_tokens_per_step_by_setting": curves,
    }
    conditions = {**surroundings(), "arctic_inference": version("arctic_inference")}
    table = table_of(_COLUMNS, rows, section=lambda row: row["stream"])
    return report(conditions, out, rows, summary, table, f"{summary['by_mean_nodes']}")


def _point(counts: np.ndarray) -> tuple[float, float]:
    tokens, steps, proposed = counts.sum(1).tolist()
    return proposed / steps, tokens / steps


_RATIOS = ("ratio", "accepted_ratio")
_COLUMNS: tuple[Column, ...] = (
    ("kind", lambda row: row["stream"]),
    ("requests", lambda row: str(row["requests"])),
    ("nodes", lambda row: "{:.1f} and {:.1f}".format(*row["nodes"])),
    ("tokens per step", lambda row: "{:.3f} and {:.3f}".format(*row["tokens_per_step"])),
    ("ratio", lambda row: "{:.3f} [{:.3f}, {:.3f}]".format(*row["ratio"])),
    ("of accepted alone", lambda row: "{:.3f} [{:.3f}, {:.3f}]".format(*row["accepted_ratio"])),
)
