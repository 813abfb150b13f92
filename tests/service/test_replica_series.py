"""The exported fates are those that the modules can tell."""

import re
from dataclasses import replace
from typing import get_args

from adaptation.errors import RefusalReason
from adaptation.replicas.standing import Stand
from adaptation.status import ReplicaStatus
from service.replica_series import QUERY_FATES, REPLICA_SERIES, STANDINGS, VERSION_FATES
from tests.architecture.rules import ROOT
from tests.service.scripted import STATUS

_COUNTED = re.compile(r'fates\["(\w+)"\]|_drop\(delivered, "(\w+)"|_put_off\([\w.]+, "(\w+)"')


def words(name: str) -> set[str]:
    """Every word under which this module counts something."""
    source = (ROOT / "adaptation" / "replicas" / f"{name}.py").read_text()
    return {word for found in _COUNTED.findall(source) for word in found if word}


def test_every_fate_has_a_series() -> None:
    arriving = {"torn", "forged", "foreign", "misfit", "not_finite"}
    assert words("outbox") | words("hearing") | arriving == set(QUERY_FATES)
    assert words("following") | set(get_args(RefusalReason)) | {"announced"} == set(VERSION_FATES)
    assert set(get_args(Stand)) == set(STANDINGS)


def test_the_series_are_read_from_the_status() -> None:
    replicas = ReplicaStatus(
        standing="leading", connected=True, epoch=4, queries={"heard": 3}, versions={"old": 1}, connections_lost=2
    )
    status = replace(STATUS, replicas=replicas)
    assert {series.name: dict(series.read(status)) for series in REPLICA_SERIES} == {
        "replica_connected": {"": 1.0},
        "replica_standing": {"leading": 1.0},
        "replica_epoch": {"": 4.0},
        "replica_connections_lost": {"": 2.0},
        "replica_queries": {"heard": 3},
        "replica_versions": {"old": 1},
    }
