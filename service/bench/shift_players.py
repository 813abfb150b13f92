"""Builds those who take turns, each with an engine of its own, and lets them play under a progress bar.

Knows neither what is streamed nor what is made of the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from adaptation.config import PolicyName
from service.adaptive import build_adaptive
from service.assembly import Assembly
from service.bench.shift_figures import PLAIN
from service.bench.shift_learning import Learning, Nobody, Notes
from service.bench.shift_stream import Turn
from service.bench.shift_turns import Played, Player, play_all
from service.bench.speed import Measure
from service.logging import counting


@contextmanager
def players_of(assembly: Assembly, policies: Mapping[str, PolicyName], seed: int) -> Iterator[list[Player]]:
    """One engine for each name, with that policy, all starting from the same weights and from nothing learnt."""
    with TemporaryDirectory(prefix="adaptree-bench-") as folder, ExitStack() as closing:
        players = []
        for name, policy in policies.items():
            player = _player(assembly, name, policy, Path(folder) / name, seed)
            closing.callback(player.close)
            players.append(player)
        yield players


def play_with_bars(
    players: Sequence[Player], turns: Mapping[str, Sequence[Turn]], measure: Measure
) -> dict[str, list[Played]]:
    """Every player's turns, by its name, after an answer that nobody measures."""
    for player in players:
        player.warm_up(turns[player.name][0].prompts[0])
    with counting() as progress:
        tasks = {name: progress.add_task(name, total=_num_queries(mine)) for name, mine in turns.items()}
        return play_all(players, turns, measure, lambda name, done: progress.advance(tasks[name], done))


def _player(assembly: Assembly, name: str, policy: PolicyName, folder: Path, seed: int) -> Player:
    notes = Notes()
    if policy == PLAIN:
        return Player(name, assembly.engine(), Nobody(), notes)
    # Rests between updates pass while others have their turn; waiting for them as well would be time nobody loses.
    config = assembly.config.adaptation.model_copy(update={"policy": policy, "duty_cycle": 1.0})
    adaptive = build_adaptive(assembly, config, folder=folder, emit=notes.note, seed=seed)
    return Player(name, adaptive.engine, Learning(adaptive), notes)


def _num_queries(turns: Sequence[Turn]) -> int:
    return sum(len(turn.queries) for turn in turns)
