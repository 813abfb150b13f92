"""The thread through which a replica learns with others: it leads or follows, sends and fetches.

All waiting for the store is done here, and in no other thread. Where the store is lost the replica learns by itself
after as long as a lease lasts, and comes back by itself.
"""

import hashlib
import logging
import os
import platform
import random
import secrets
import threading
import time
from typing import Final, Literal

from adaptation.config import AdaptationConfig
from adaptation.learner import Learner
from adaptation.records import ReplicaStatus, StoreLost
from adaptation.replicas.follower import Follower, QuerySender, Replica, ServedWeights, VersionState
from adaptation.replicas.leader import Leader
from adaptation.replicas.redis_store import LEASE_SECONDS, MAX_QUERIES, Lease, RedisStore
from adaptation.replicas.wire import QueryCodec, QueryShape, weights_to_bytes
from adaptation.weights import ServedDrafter
from adaptation.worker import Worker, bound_threads, step_back
from drafters.feedback import QueryFeedback

logger = logging.getLogger(__name__)

Role = Literal["alone", "following", "leading"]

_STEP_SECONDS: Final = 0.1
_FIRST_RETRY_SECONDS: Final = 0.1
_LONGEST_RETRY_SECONDS: Final = 2.0
_COMMANDS_PER_LEASE: Final = 2  # that may fail before a lease has run out
_FORMAT: Final = 3  # of what travels


class LocalOnly:
    """With nobody: what the engine tells goes straight to the learner of this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def start(self) -> None:
        """There is nobody to talk to."""

    def stop(self) -> bool:
        return True

    def offer(self, feedback: QueryFeedback) -> None:
        self._worker.offer(feedback)

    def status(self) -> ReplicaStatus:
        return ReplicaStatus()


class Exchange:
    """With the replicas that share a store."""

    def __init__(self, replica: Replica, *, max_queries: int = MAX_QUERIES) -> None:
        self.connected = False
        self.num_lost = 0
        self.role: Role = "following"  # written by the thread that talks to the others, read by any
        self._replica = replica
        self._store, self._lease, self._worker = replica.store, replica.lease, replica.worker
        self._worker.trains = False
        self._sender = QuerySender(replica, max_queries=max_queries)
        self._follower = Follower(replica)
        self._leader = Leader(replica, self._follower)
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._answered_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the thread, and let another replica lead at once. # -> whether it has ended in time"""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def offer(self, feedback: QueryFeedback) -> None:
        """A finished query, to be heard here or sent to whoever leads. Called by the engine thread; never waits."""
        (self._sender if self.role == "following" else self._worker).offer(feedback)

    def status(self) -> ReplicaStatus:
        """From any thread."""
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
        bound_threads(1)
        step_back(self._replica.learner.tuning.niceness)
        while not self._stopping.is_set():
            self._stopping.wait(self.attempt())
        try:
            self._lease.release()
        except StoreLost as error:
            logger.info("leaving without a word to the other replicas: %s", error)
        self._store.close()

    def attempt(self) -> float:
        """One step, whatever comes of it. # -> seconds until the next: twice as many each time, never all at once"""
        try:
            self.step()
        except StoreLost as error:
            self._disconnected(str(error))
        except Exception:
            logger.exception("learning with other replicas failed; trying again")
            self._disconnected("an error of this process")
        else:
            return _STEP_SECONDS
        longest = self._retry_seconds
        self._retry_seconds = min(_LONGEST_RETRY_SECONDS, 2 * longest)
        return random.uniform(longest / 2, longest)

    def step(self) -> None:
        """Everything that is due with the others, once. Raises StoreLost."""
        if not self.connected:
            self._connect()
        if self._lease.hold(self._replica.state.record.epoch):
            self._enter("leading")
            self._sender.hand_over()
            self._leader.step(self._lease.epoch)
        else:
            self._enter("following")
            self._follower.step()
            self._sender.send()
        self._answered_at = time.monotonic()

    def _connect(self) -> None:
        """The store may be another one than before, or have forgotten everything."""
        self._store.join()
        self._lease.raise_epoch(self._replica.state.record.epoch)
        self.connected = True
        self._retry_seconds = _FIRST_RETRY_SECONDS
        logger.info("connected with the other replicas")

    def _disconnected(self, reason: str) -> None:
        if self.connected:
            self.num_lost += 1
            logger.warning("the store of the replicas is lost: %s", reason)
        self.connected = False
        self._replica.served.now()  # what is learnt meanwhile is told by the status
        if time.monotonic() - self._answered_at > self._lease.seconds:
            self._enter("alone")
            self._sender.hand_over()

    def _enter(self, role: Role) -> None:
        if self.role != role:
            logger.info("replica %s: %s, was %s", self._replica.name, role, self.role)
        self.role, self._worker.trains = role, role != "following"


Replicas = Exchange | LocalOnly
"""Whom a process learns with."""


def join_replicas(
    config: AdaptationConfig,
    learner: Learner,
    drafter: ServedDrafter,
    *,
    target_identity: str,
    lease_seconds: float = LEASE_SECONDS,
    max_queries: int = MAX_QUERIES,
) -> tuple[Worker, Replicas]:
    """The thread that learns, and whom it learns with. Raises ValueError where that cannot be."""
    worker = learner.worker()
    if config.redis_url is None:
        return worker, LocalOnly(worker)
    name, fingerprint = f"{platform.node()}:{os.getpid()}", fingerprint_of(drafter, target_identity)
    secret = None if config.redis_secret is None else config.redis_secret.get_secret_value().encode()
    try:
        store = RedisStore(
            config.redis_url.get_secret_value(),
            f"adaptree:{fingerprint[:16]}",
            name=f"{name}:{secrets.token_hex(8)}",  # no other start of any process has this one
            timeout_seconds=lease_seconds / _COMMANDS_PER_LEASE,
            max_queries=max_queries,
        )
    except ValueError as error:
        raise ValueError(f"adaptation.redis_url cannot be used: {error}") from error
    served, network, tuning = ServedWeights(learner.weights), drafter.config, learner.tuning
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
    """Whatever queries and weights must fit: the target, and the drafter's shape, vocabulary and deployed weights."""
    digest = hashlib.sha256(f"{_FORMAT} {target_identity} {drafter.config.as_json}".encode())
    digest.update(weights_to_bytes(drafter.weights))
    return digest.hexdigest()
