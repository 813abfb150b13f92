"""Connects this replica to others through Redis, as leader or follower.

Only the exchange's thread waits for the store. If the store is lost for longer than a lease, the replica learns alone
until it has reconnected.
"""

import hashlib
import logging
import os
import platform
import secrets
import threading
import time
from typing import Final

from adaptation.config import AdaptationConfig, Tuning
from adaptation.learner import Learner
from adaptation.records import Refused, ReplicaStatus, Role, StoreLost
from adaptation.replicas.follower import Follower, QuerySender, Replica, ServedWeights, VersionState
from adaptation.replicas.leader import Leader
from adaptation.replicas.redis_store import LEASE_SECONDS, MAX_QUERIES, Lease, RedisStore, talk
from adaptation.replicas.wire import QueryCodec, QueryShape, weights_to_bytes
from adaptation.weights import ServedDrafter
from adaptation.worker import Worker
from drafters.feedback import QueryFeedback

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 5.0
_COMMANDS_PER_LEASE: Final = 2  # commands that may time out before a lease ends
_FORMAT: Final = 4  # version of the wire format; queries of version 3 (0.2.0) lack fields


class LocalOnly:
    """Exchange of a replica without a store: finished queries go to the learner of this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def start(self) -> None:
        """No-op."""

    def stop(self) -> bool:
        """No-op. Returns True."""
        return True

    def offer(self, feedback: QueryFeedback) -> None:
        """Hand a finished query to the learner."""
        self._worker.offer(feedback)

    def forget(self, scope: str | None) -> None:
        """Forget the texts of a scope, or of all scopes."""
        self._worker.forget(scope)

    def status(self) -> ReplicaStatus:
        """Return the status of a replica without a store."""
        return ReplicaStatus()


class Exchange:
    """Runs this replica as leader or follower, in the thread that talks to the shared store."""

    def __init__(self, replica: Replica, *, max_queries: int = MAX_QUERIES) -> None:
        self.connected = False
        self.num_lost = 0
        self.role: Role = "following"  # written by this object's thread, read by any thread
        self._replica = replica
        replica.worker.trains = False
        self._sender = QuerySender(replica, max_queries=max_queries)
        self._follower = Follower(replica)
        self._leader = Leader(replica, self._follower)
        self._answered_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> bool:
        """End the thread, and let another replica lead at once. Returns whether it ended in time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()

    def offer(self, feedback: QueryFeedback) -> None:
        """Pass a finished query to the learner, or to the leader. Called by the engine thread; never waits."""
        (self._sender if self.role == "following" else self._replica.worker).offer(feedback)

    def forget(self, scope: str | None) -> None:
        """Forget the texts of a scope, or of all scopes, that this process still has. Called by the engine thread."""
        self._sender.forget(scope)
        self._replica.worker.forget(scope)

    def status(self) -> ReplicaStatus:
        """Return the status of this replica. Called from any thread."""
        replica = self._replica
        record = replica.state.record
        return ReplicaStatus(
            name=replica.name,
            role=self.role,
            connected=self.connected,
            leader=record.leader,
            epoch=record.epoch,
            number=max(0, record.number),
            announced_sha256=record.sha256,
            served_sha256=replica.served.last_seen.sha256,
            queries=dict(replica.queries),
            versions=dict(replica.versions),
            connections_lost=self.num_lost,
        )

    def _run(self) -> None:
        talk(self.attempt, self._stopping, self._replica.worker.niceness)
        try:
            self._replica.lease.release()
        except StoreLost as error:
            logger.info("the lease could not be released and will expire by itself: %s", error)
        self._replica.store.close()

    def attempt(self) -> bool:
        """Take one step and handle its errors. Returns whether this replica is connected to the store."""
        try:
            self.step()
        except StoreLost as error:
            self._disconnected(str(error))
        except Exception:
            logger.exception("the exchange with other replicas failed; trying again")
            self._disconnected("an error of this process")
        return self.connected

    def step(self) -> None:
        """Lead or follow, and send queries, once. Raises StoreLost."""
        if not self.connected:
            self._connect()
        if self._replica.lease.hold(self._replica.state.record.epoch):
            self._enter("leading")
            self._sender.hand_over()
            self._leader.step(self._replica.lease.epoch)
        else:
            self._enter("following")
            self._follower.step()
            self._sender.send()
        self._answered_at = time.monotonic()

    def _connect(self) -> None:
        """Connect to the store, which may have been replaced or emptied."""
        self._replica.store.join()
        try:
            self._replica.store.inherit(lambda raw: self._replica.state.check(raw).sha256)
        except Refused as refusal:
            logger.warning("ignoring the state that replicas of 0.3.0 left in Redis: %s", refusal)
        self._replica.lease.raise_epoch(self._replica.state.record.epoch)
        self.connected = True
        logger.info("connected to the store of the replicas")

    def _disconnected(self, reason: str) -> None:
        if self.connected:
            self.num_lost += 1
            logger.warning("lost the connection to the store of the replicas, reconnecting: %s", reason)
        self.connected = False
        self._replica.served.now()  # updates the status: weights may change while the store is lost
        if time.monotonic() - self._answered_at > self._replica.lease.seconds:
            if self.role != "alone":
                logger.warning("learning without the other replicas until their Redis server answers: %s", reason)
            self._enter("alone")
            self._sender.hand_over()

    def _enter(self, role: Role) -> None:
        if self.role != role:
            logger.info("replica %s: %s, was %s", self._replica.name, role, self.role)
        self.role, self._replica.worker.trains = role, role != "following"


Replicas = Exchange | LocalOnly


def join_replicas(
    config: AdaptationConfig,
    learner: Learner,
    drafter: ServedDrafter,
    tuning: Tuning,
    *,
    target_identity: str,
    lease_seconds: float = LEASE_SECONDS,
    max_queries: int = MAX_QUERIES,
) -> tuple[Worker, Replicas]:
    """Build the learning thread, and the connection to other replicas if a store is configured. Raises ValueError for a
    store that cannot be used."""
    device = learner.weights.train_device
    worker = Worker(learner, max_waiting=tuning.queued_queries, niceness=tuning.niceness, device=device)
    if config.redis_url is None:
        return worker, LocalOnly(worker)
    name, fingerprint = f"{platform.node()}:{os.getpid()}", fingerprint_of(drafter, target_identity)
    secret = None if config.redis_secret is None else config.redis_secret.get_secret_value().encode()
    store = RedisStore(
        config.redis_url.get_secret_value(),
        f"adaptree:{fingerprint[:16]}",
        name=f"{name}:{secrets.token_hex(8)}",  # unique per start of a process
        timeout_seconds=lease_seconds / _COMMANDS_PER_LEASE,
        max_queries=max_queries,
    )
    served, network = ServedWeights(learner.weights), drafter.config
    shape = QueryShape(
        width=len(network.tap_layers) * network.hidden_size,
        hidden=network.hidden_size,
        top=min(tuning.target_top, network.target_vocab_size),
        vocab=network.target_vocab_size,
        most_tokens=tuning.window_tokens + 1,
        dtype=drafter.weights["lm_head.weight"].dtype,
    )
    replica = Replica(
        name=name,
        store=store,
        lease=Lease(store, seconds=lease_seconds, eligible=config.policy != "never"),
        codec=QueryCodec(fingerprint, shape, secret),
        state=VersionState(fingerprint, len(served.now().data), secret),
        served=served,
        learner=learner,
        worker=worker,
    )
    return worker, Exchange(replica, max_queries=max_queries)


def fingerprint_of(drafter: ServedDrafter, target_identity: str) -> str:
    """Hash that replicas must share to use each other's queries and weights: of the target, and the drafter's shape,
    vocabulary and deployed weights."""
    digest = hashlib.sha256(f"{_FORMAT} {target_identity} {drafter.config.as_json}".encode())
    digest.update(weights_to_bytes(drafter.weights))
    return digest.hexdigest()
