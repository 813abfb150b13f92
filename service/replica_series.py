"""Which numbers of learning with other replicas are exported; tables only. All are zero where there are no others."""

from typing import Final

from adaptation.status import AdaptationStatus
from service.series import Asked

STANDINGS: Final = ("alone", "following", "leading")
_REFUSALS: Final = ("torn", "forged", "foreign", "misfit", "not_finite")  # of whatever arrives
QUERY_FATES: Final = (
    "sent",
    "heard",
    "duplicate",
    "queue_full",
    "too_large",
    "not_stored",
    "store_refused",
    "unusable",
    *_REFUSALS,
)
VERSION_FATES: Final = ("announced", "followed", "not_served", "old", "fork", *_REFUSALS)

REPLICA_SERIES: Final[tuple[Asked[AdaptationStatus], ...]] = (
    Asked(
        "gauge",
        "replica_connected",
        "1 while the store of the replicas answers.",
        lambda status: {"": float(status.replicas.connected)},
    ),
    Asked(
        "gauge",
        "replica_standing",
        "1 for how this process stands among the replicas; alone: nobody is asked, or can be.",
        lambda status: {status.replicas.standing: 1.0},
        ("standing",),
        STANDINGS,
    ),
    Asked(
        "gauge",
        "replica_epoch",
        "Epoch of the leader whose version is served.",
        lambda status: {"": float(status.replicas.epoch)},
    ),
    Asked(
        "counter",
        "replica_connections_lost",
        "Times the store of the replicas was lost.",
        lambda status: {"": float(status.replicas.connections_lost)},
    ),
    Asked(
        "counter",
        "replica_queries",
        "Finished queries on their way to the learner of all replicas, by what became of them.",
        lambda status: status.replicas.queries,
        ("fate",),
        QUERY_FATES,
    ),
    Asked(
        "counter",
        "replica_versions",
        "Versions on their way to the replicas, by what became of them.",
        lambda status: status.replicas.versions,
        ("fate",),
        VERSION_FATES,
    ),
)
