"""Prices and texts of replays (benchmarks/decisions.py).

Prices. A file is a report of `python -m benchmarks gpu` or prices-cpu.json. Since reports have a section "prices" (by
sections load), it is taken as it is. Older reports (gpu-h100.json, gpu-steps-h200.json) and the CPU's:
- Forwards: rows "verify: forward", 1 to 32 rows. Steps of up to 512 rows are captured today (captured.py), which no
  file has: up to there more rows cost what the slope from 16 to 32 rows says. Above, forwards run kernel by kernel and
  cost at least what the 256 rows did that ran so; a start-up measures two such points (here 513 and 2048 rows). With
  --eager this begins above 32 rows and one row of each sequence, as when it was recorded.
- Drafting: "drafter: forwards and growth" of one sequence; assumed: 1 % more for each further one.
- Other seconds of plain and drafted steps: "decode: step" and "drafter: step" without their forward and drafting;
  assumed: 0.02 ms more for each further sequence (16 and 64 plain texts of gpu-h100.json, section load).
- prices-cpu.json: {"verify": CostTable, "drafts": DraftCosts} as a server's costs-*.json has them, and "other": seconds
  outside of forward and drafting of steps by "sequences", "plain" and "drafted".
- `DEAR_ROWS` is made up: two rows cost nearly twice as much as one.
A clock has noise of 4 % in each forward, and a drift of 5 % that lasts 500 steps (assumed).
A server starts from a table that is off by 3 % in all and 3 % at each point, and by 10 % for drafting (assumed).

Texts. Means by kind: `tau` by set at T = 0 in served-cpu-t0.json, over their mean; drafts that were suspended there
make them differ more than drafts do. The level at T = 0 and 1 and the shape by depth: `accepted_by_best` of memory and
network in calibration-cpu.json, read as one chain in the order of survival. Within a kind texts differ by 0.4 (logit),
so that accepted lengths differ by 0.1 to 0.9 as in docs/budget.md. Claims are off by 0.3 per text and 0.5 per step
(logit, assumed), and calibrated in the mean. Answers have 128 tokens in the mean, prompts 100, both exponential;
assumed: a drafter that has not read a text is no worse there than elsewhere.

Legend: depth = nodes of a chain, points as in service/engine/costs.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from service.engine.captured import ROWS as CAPTURED
from service.engine.costs import CostTable, DraftCosts, FloatArray, rising
from service.engine.draft_gate import SequenceGain, traffic_class

DEPTH = 16
LONGEST_PROMPT = 256  # tokens; one chunk, as settings are by default
TEMPERATURES = (0.0, 1.0)
_TABLE_ERROR, _DRAFT_ERROR = 0.03, 0.1
_NOISE, _DRIFT, _DRIFT_STEPS = 0.04, 0.05, 500
_AXES = "sequences", "context", "rows"
_TEXT_SD, _TEXT_CLAIM_SD, _STEP_CLAIM_SD = 0.4, 0.3, 0.5
_ANSWER, _PROMPT, _SHORTEST = 128, 100, 8  # tokens
_DEPTHS: Mapping[float, FloatArray] = {  # conditional acceptance by depth, the last for all deeper nodes
    0.0: np.array([0.578, 0.623, 0.735, 0.80, 0.85, 0.87]),  # 0.58, 0.94, 1.20, 1.61, 2.01 with 1, 2, 3, 5, 8 nodes
    1.0: np.array([0.41, 0.463, 0.63, 0.62, 0.75, 0.80]),  # 0.41, 0.60, 0.72, 0.85, 0.97
}
_TAUS = np.array([1.53, 2.68, 2.93, 2.21, 1.92, 2.43, 2.08, 2.38, 2.04, 1.30])  # served-cpu-t0.json, by set
_KINDS = (_TAUS - 1) / (_TAUS - 1).mean()
_TREE = 5  # nodes of the trees whose accepted lengths kinds are scaled by


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """True seconds of a machine."""

    name: str
    verify: CostTable
    drafts: DraftCosts
    plain_other: tuple[FloatArray, FloatArray]  # numbers of sequences, and seconds outside of the forward
    drafted_other: tuple[FloatArray, FloatArray]  # the same for steps with drafts, without drafting
    captured: bool  # whether trees have fixed widths

    def other(self, sequences: int, *, drafted: bool) -> float:
        """Seconds of a step outside of forward and drafting."""
        return float(np.interp(sequences, *(self.drafted_other if drafted else self.plain_other)))

    def measured(self, rng: np.random.Generator) -> tuple[CostTable, DraftCosts]:
        """Costs as a server finds them at its start, a little wrong."""
        table, count = self.verify, self.verify.rows.size
        errors = np.exp(rng.normal(0, _TABLE_ERROR) + rng.normal(0, _TABLE_ERROR, count))
        drafts = self.drafts.seconds * np.exp(rng.normal(0, _DRAFT_ERROR))
        found = replace(table, rows=table.rows[:count], seconds=rising(table.seconds[..., :count] * errors, 2))
        return found, replace(self.drafts, seconds=drafts)


DEAR_ROWS = Prices(
    name="dear rows",
    verify=CostTable(
        sequences=np.ones(1),
        contexts=np.ones(1),
        rows=np.array([1.0, 2.0, 512.0]),
        seconds=1e-3 * np.array([[[5.0, 9.5, 9.5 + 510 * 4.5]]]),
    ),
    drafts=DraftCosts(batches=np.array([1.0, 64.0]), seconds=np.array([5e-4, 5e-3])),
    plain_other=(np.ones(1), np.full(1, 5e-4)),
    drafted_other=(np.ones(1), np.full(1, 7e-4)),
    captured=False,
)


def read_prices(file: Path, *, eager: bool) -> list[Prices]:
    """Read the machines of a file, see the module docstring."""
    content = json.loads(file.read_text())
    recorded = [row for row in content.get("rows", ()) if row["section"] == "prices"]
    if any(row["name"] == "forward" for row in recorded):
        return [_measured(file.stem, recorded)]
    if "verify" in content:
        table = {name: np.array(values, dtype=np.float64) for name, values in content["verify"].items()}
        drafts = {name: np.array(values, dtype=np.float64) for name, values in content["drafts"].items()}
        other = {name: np.array(values, dtype=np.float64) for name, values in content["other"].items()}
        prices = Prices(
            name=file.stem.removeprefix("prices-"),
            verify=CostTable(**table),
            drafts=DraftCosts(**drafts),
            plain_other=(other["sequences"], other["plain"]),
            drafted_other=(other["sequences"], other["drafted"]),
            captured=False,
        )
        return [prices]
    found = dict[str, dict[tuple[str, ...], float]]()  # by model; the last measurement of a figure counts
    for row in content["rows"]:
        place = (row["section"], row["name"], *(str(row["at"].get(axis, "")) for axis in ("context", "rows")))
        found.setdefault(row["at"].get("model", ""), {})[place] = row["value"] / 1e3
    machine = file.stem.split("-")[-1]
    return [_of_gpu(f"{machine} {name}", of, eager=eager) for name, of in found.items() if _forwards(of, 256)]


def _measured(name: str, rows: Sequence[Mapping[str, Any]]) -> Prices:
    """Prices as section load of `python -m benchmarks gpu` writes them. Steps with drafts take as long besides forward
    and drafting as plain ones where none was measured."""
    points = {axis: np.unique([row["at"][axis] for row in rows if axis in row["at"]]) for axis in _AXES}
    seconds = np.full([len(points[axis]) for axis in _AXES], np.nan)
    others = dict[str, dict[int, float]]()
    for row in rows:
        if row["name"] == "forward":
            seconds[*(int(points[axis].searchsorted(row["at"][axis])) for axis in _AXES)] = row["value"] / 1e3
        else:
            others.setdefault(row["name"], {})[row["at"]["sequences"]] = row["value"] / 1e3
    known = ~np.isnan(seconds).all((1, 2))  # drafting and others are measured for other numbers of sequences
    table = CostTable(
        sequences=points["sequences"][known].astype(float),
        contexts=points["context"].astype(float),
        rows=points["rows"].astype(float),
        seconds=seconds[known],
    )
    curves = {kind: (np.array([*of], float), np.array([*of.values()])) for kind, of in others.items()}
    batches, drafting = curves["drafting"]
    plain = curves["other plain"]
    drafts = DraftCosts(batches=batches, seconds=drafting)
    return Prices(
        name=name,
        verify=table,
        drafts=drafts,
        plain_other=plain,
        drafted_other=curves.get("other drafted", plain),
        captured=True,
    )


def _forwards(of: Mapping[tuple[str, ...], float], context: int) -> dict[int, float]:
    return {
        int(rows): seconds
        for (section, _, at, rows), seconds in of.items()
        if section == "verify" and at == str(context)
    }


def _of_gpu(name: str, of: Mapping[tuple[str, ...], float], *, eager: bool) -> Prices:
    """Prices by a GPU's figures. # of: seconds by section, name, context and rows"""
    sequences, contexts = np.array([1.0, 16.0, 64.0]), (256, 2048)
    rows = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, CAPTURED[-1], CAPTURED[-1] + 1, 2048])
    timed = np.array([[_forwards(of, context)[count] for count in rows[:9]] for context in contexts])
    slope = (timed[:, 5:6] - timed[:, 4:5]) / 16
    whole = np.concatenate([rising(timed[:, :6], 1), timed[:, 5:6] + slope * (rows[6:] - 32)], 1)
    one_by_one = np.maximum(whole, np.concatenate([timed, timed[:, [-1] * 3]], 1))
    fits = rows <= (np.maximum(32, sequences)[:, None] if eager else CAPTURED[-1])  # [sequences or 1, rows]
    seconds = np.where(np.broadcast_to(fits, (3, rows.size))[:, None], whole, one_by_one)
    drafting = of["drafter", "forwards and growth", "", ""]
    further = 2e-5 * (sequences - 1)
    plain = of["decode", "step", "64", ""] - whole[0, 0]
    drafted = of["drafter", "step", "", ""] - drafting - whole[0, 5]
    return Prices(
        name=name + (" eager" if eager else ""),
        verify=CostTable(
            sequences=sequences,
            contexts=np.array(contexts, dtype=float),
            rows=rows.astype(float),
            seconds=rising(seconds, 2),
        ),
        drafts=DraftCosts(batches=sequences, seconds=drafting * (1 + 0.01 * (sequences - 1))),
        plain_other=(sequences, plain + further),
        drafted_other=(sequences, drafted + further),
        captured=True,
    )


@cache
def _chances(temperature: float, accepted: float) -> FloatArray:
    """Logits of conditional acceptance of a kind of text, by depth. `accepted`: of `_TREE` nodes, over all kinds' mean.
    # -> [depth]"""
    known = _DEPTHS[temperature]
    base = np.log(known / (1 - known))[np.minimum(np.arange(DEPTH), known.size - 1)]
    offsets = np.linspace(-6, 6, 601)
    lengths = _sigmoid(base + offsets[:, None])[:, :_TREE].cumprod(1).sum(1)
    mean = known[:_TREE].cumprod().sum()
    return base + float(np.interp(accepted * mean, lengths, offsets))


def _sigmoid(logits: FloatArray) -> FloatArray:
    found: FloatArray = 1 / (1 + np.exp(-logits))
    return found


class Text:
    """A prompt and its answer, with all the luck that drafts will have."""

    def __init__(self, temperature: float, rng: np.random.Generator) -> None:
        self.unread = self.prompt = min(LONGEST_PROMPT, _SHORTEST + int(rng.exponential(_PROMPT - _SHORTEST)))
        self.length = _SHORTEST + int(rng.exponential(_ANSWER - _SHORTEST))
        logits = _chances(temperature, float(rng.choice(_KINDS))) + rng.normal(0, _TEXT_SD)
        self.survival = _sigmoid(logits).cumprod()  # [depth]
        luck = np.lib.stride_tricks.sliding_window_view(rng.random(self.length + DEPTH), DEPTH)[: self.length]
        self._runs: list[int] = (luck < _sigmoid(logits)).cumprod(1).sum(1).tolist()  # accepted from here on, of DEPTH
        errors = rng.normal(0, _TEXT_CLAIM_SD) + rng.normal(0, _STEP_CLAIM_SD, (self.length, 1))
        wide = np.sqrt(1 + np.pi / 8 * (_TEXT_CLAIM_SD**2 + _STEP_CLAIM_SD**2))  # calibrates (MacKay, 1992)
        self._claims = _sigmoid((logits + errors) / wide).cumprod(1)  # [length, depth]
        self.gain = SequenceGain(traffic_class(temperature, has_grammar=False))
        self.emitted = 0

    @property
    def claims(self) -> FloatArray:
        """Survival that the drafter claims in this step. # [depth]"""
        claims: FloatArray = self._claims[self.emitted]
        return claims

    @property
    def deepest(self) -> int:
        """Depth that can still be emitted."""
        return min(DEPTH, self.length - self.emitted - 1)

    def accepted(self, nodes: int) -> int:
        """Accepted length of a chain of so many nodes."""
        return min(nodes, self._runs[self.emitted])


@dataclass(slots=True)
class Step:
    """A step before anything is drafted."""

    decoding: list[Text]
    reading: list[Text]
    num_rows: int  # without nodes
    context: float
    starts: bool  # whether a text begins

    @property
    def num_sequences(self) -> int:
        """Texts of the step."""
        return len(self.decoding) + len(self.reading)


class Choice(NamedTuple):
    """What a contestant does in a step."""

    nodes: list[int]  # of each text in `Step.decoding`
    node_rows: int  # laid out for all trees, padding included
    drafting: int  # texts that run the drafter
    followed: bool


class Times(NamedTuple):
    """Seconds of a step."""

    verify: float
    draft: float
    other: float
    follow: float  # part of `other`


class Clock:
    """Seconds of steps by true prices, with noise and drift."""

    def __init__(self, prices: Prices, rng: np.random.Generator) -> None:
        self._prices, self._rng, self._drift = prices, rng, 0.0

    def times(self, step: Step, choice: Choice) -> Times:
        """Seconds that this choice takes."""
        prices, kept = self._prices, 1 - 1 / _DRIFT_STEPS
        self._drift = kept * self._drift + self._rng.normal(0, _DRIFT * np.sqrt(1 - kept**2))
        drift, noise = np.exp(self._drift), np.exp(self._rng.normal(0, _NOISE))
        rows = np.array([float(step.num_rows + choice.node_rows)])
        verify = float(prices.verify.verify_seconds(rows, step.context, step.num_sequences)[0])
        draft = prices.drafts.draft_seconds(choice.drafting) if choice.drafting else 0.0
        plain, drafted = (prices.other(step.num_sequences, drafted=one) for one in (False, True))
        follow = max(0.0, drafted - plain) if choice.followed else 0.0
        other = drafted if choice.drafting else plain + follow
        return Times(verify * noise * drift, draft * drift, other * drift, follow * drift)
