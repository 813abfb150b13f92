"""Tables of what an observed run found."""

from collections.abc import Sequence

from rich.table import Table

from service.bench.anatomy import Anatomy, Share

_CLASSES = ("rank 1", "ranks 2-4", "ranks 5-10", "beyond")


def anatomy_tables(anatomies: Sequence[tuple[str, Anatomy]]) -> list[Table]:
    """One line per named anatomy in each table; tables about what was not there are left out."""
    tables = [_alphas(anatomies), _credits(anatomies)]
    trained = [(name, anatomy) for name, anatomy in anatomies if anatomy.rank_head]
    return [*tables, _positions(trained), _rank_head(trained)] if trained else tables


def _alphas(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    depths = range(1, 1 + len(anatomies[0][1].alpha))
    table = Table("", "of", "", *(f"alpha {depth}" for depth in depths), "ECE", "ECE, tried")
    for name, anatomy in anatomies:
        errors = [_share(anatomy.survival_ece), _share(anatomy.conditional_ece)]
        table.add_row(name, anatomy.alpha_of, "tree", *map(_rate, anatomy.alpha), *errors)
        table.add_row("", "", "spine", *map(_rate, anatomy.spine_alpha), end_section=True)
    table.caption = (
        "alpha k: share of drafts with the true token at depth k, of those with the true one at k - 1; "
        "ECE: calibration error of survival; tried: of survival given the parent, where the parent came true"
    )
    return table


def _positions(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    size = max(place.position for _, anatomy in anatomies for place in anatomy.positions)
    table = Table("", "forward", "", *(f"position {number}" for number in range(1, size + 1)))
    for name, anatomy in anatomies:
        for forward in ("first", "later"):
            mine = {place.position: place for place in anatomy.positions if place.forward == forward}
            numbers = range(1, size + 1)
            first = [_rate(mine[number].first_rank) if number in mine else "" for number in numbers]
            any_rank = [_rate(mine[number].any_rank) if number in mine else "" for number in numbers]
            table.add_row(name, forward, "rank 1", *first)
            table.add_row("", "", "ranks 1-10", *any_rank, end_section=True)
    table.caption = "share of block positions where the true token stood there, all before it in the block being right"
    return table


def _rank_head(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    table = Table("", "rank head", *_CLASSES)
    for name, anatomy in anatomies:
        table.add_row(name, "precision", *(_rate(score.precision) for score in anatomy.rank_head))
        table.add_row("", "recall", *(_rate(score.recall) for score in anatomy.rank_head))
        counts = (f"{score.recall.of:,}" for score in anatomy.rank_head)
        table.add_row("", "positions", *counts, end_section=True)
    return table


def _credits(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    table = Table("", "source", "accepted", "alone", "drafted steps", "steps")
    for name, anatomy in anatomies:
        for place, credit in enumerate(anatomy.credits):
            counts = (credit.accepted, credit.alone, anatomy.drafted_steps, anatomy.steps)
            table.add_row("" if place else name, credit.source, *(f"{count:,}" for count in counts))
    table.caption = "accepted tokens by who had proposed them; alone: nobody else had"
    return table


def _rate(share: Share) -> str:
    return _share(share.rate)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
