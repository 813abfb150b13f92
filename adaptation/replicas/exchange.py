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
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from adaptation.config import AdaptationConfig, Tuning
from adaptation.learner import Learner
from adaptation.records import ReplicaStatus, StoreLost
from adaptation.replicas.follower import (
    Follower,
    QuerySender,
    ServedWeights,
    VersionState,
)
from adaptation.replicas.leader import Leader, QueryReceiver
from adaptation.replicas.redis_store import LEASE_SECONDS, MAX_QUERIES, Lease, QueryStream, RedisStore, VersionStore
from adaptation.replicas.wire import QueryCodec, QueryShape, weights_from_bytes, weights_to_bytes
from adaptation.trainer import UpdateReport
from adaptation.weights import ServedDrafter
from adaptation.worker import Loop, Worker, bound_threads, step_back
from drafters.feedback import QueryFeedback

logger = logging.getLogger(__name__)

Role = Literal["alone", "following", "leading"]

_STEP_SECONDS: Final = 0.1
_FIRST_RETRY_SECONDS: Final = 0.1
_LONGEST_RETRY_SECONDS: Final = 2.0
_COMMANDS_PER_LEASE: Final = 2  # that may fail before a lease has run out
_FORMAT: Final = 3  # of what travels


class LearnsByRole:
    """A learner that updates only while it is this replica's turn to learn."""

    def __init__(self, loop: Loop) -> None:
        self.role: Role = "following"  # written by the thread that talks to the others, read by any
        self.observe, self.recover, self.save = loop.observe, loop.recover, loop.save
        self._loop = loop

    @property
    def learns(self) -> bool:
        """Whether queries are heard here, and updates computed."""
        return self.role != "following"

    def update(self, interrupted: Callable[[], bool]) -> UpdateReport | None:
        if not self.learns:
            return None
        return self._loop.update(lambda: interrupted() or not self.learns)


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

    def __init__(
        self,
        *,
        name: str,
        loop: LearnsByRole,
        lease: Lease,
        stream: QueryStream,
        sender: QuerySender,
        receiver: QueryReceiver,
        follower: Follower,
        leader: Leader,
        lost_after_seconds: float,
        niceness: int,
    ) -> None:
        """`lost_after_seconds`: without the store until this replica counts itself alone."""
        self.connected = False
        self.num_lost = 0
        self._name = name
        self._loop = loop
        self._lease = lease
        self._stream = stream
        self._sender = sender
        self._receiver = receiver
        self._follower = follower
        self._leader = leader
        self._state, self._served, self._worker = follower.state, follower.served, follower.worker
        self._lost_after_seconds = lost_after_seconds
        self._niceness = niceness
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
        if self._loop.learns:
            self._worker.offer(feedback)
        else:
            self._sender.offer(feedback)

    def status(self) -> ReplicaStatus:
        """From any thread."""
        record = self._state.record
        return ReplicaStatus(
            name=self._name,
            standing=self._loop.role,
            connected=self.connected,
            leader=record.leader,
            epoch=record.epoch,
            number=max(0, record.number),
            announced_sha256=record.sha256,
            served_sha256=self._served.last_seen.sha256,
            queries={**self._sender.counts, **self._receiver.counts},
            versions={**self._follower.counts, "announced": self._leader.num_announced},
            connections_lost=self.num_lost,
        )

    def _run(self) -> None:
        bound_threads(1)
        step_back(self._niceness)
        while not self._stopping.is_set():
            self._stopping.wait(self.attempt())
        try:
            self._lease.release()
        except StoreLost as error:
            logger.info("leaving without a word to the other replicas: %s", error)

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
        if self._lease.hold(self._state.record.epoch):
            self._enter("leading")
            self._sender.hand_over(self._worker.offer)
            self._leader.step(self._lease.epoch)
        else:
            self._enter("following")
            self._follower.step()
            self._sender.send()
        self._answered_at = time.monotonic()

    def _connect(self) -> None:
        """The store may be another one than before, or have forgotten everything."""
        self._stream.join()
        self._lease.raise_epoch(self._state.record.epoch)
        self.connected = True
        self._retry_seconds = _FIRST_RETRY_SECONDS
        logger.info("connected with the other replicas")

    def _disconnected(self, reason: str) -> None:
        if self.connected:
            self.num_lost += 1
            logger.warning("the store of the replicas is lost: %s", reason)
        self.connected = False
        self._served.now()  # what is learnt meanwhile is told by the status
        if time.monotonic() - self._answered_at > self._lost_after_seconds:
            self._enter("alone")
            self._sender.hand_over(self._worker.offer)

    def _enter(self, role: Role) -> None:
        if self._loop.role != role:
            logger.info("replica %s: %s, was %s", self._name, role, self._loop.role)
        self._loop.role = role


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
    if config.redis_url is None:
        worker = learner.worker()
        return worker, LocalOnly(worker)
    name = f"{platform.node()}:{os.getpid()}"
    holder = f"{name}:{secrets.token_hex(8)}"  # no other start of any process has this name
    fingerprint = fingerprint_of(drafter, target_identity)
    prefix = f"adaptree:{fingerprint[:16]}"
    secret = None if config.redis_secret is None else config.redis_secret.get_secret_value().encode()
    try:
        store = RedisStore(config.redis_url.get_secret_value(), timeout_seconds=lease_seconds / _COMMANDS_PER_LEASE)
    except ValueError as error:
        raise ValueError(f"adaptation.redis_url cannot be used: {error}") from error
    eligible = config.redis_role == "auto"
    lease = Lease(store, prefix, name=holder, seconds=lease_seconds, eligible=eligible)
    versions = VersionStore(store, prefix, name=holder)
    stream = QueryStream(store, prefix, name=holder, max_queries=max_queries)
    codec = QueryCodec(fingerprint, _query_shape(learner.tuning, drafter), secret)
    loop = LearnsByRole(learner)
    worker = learner.worker(loop)
    served = ServedWeights(learner.weights)
    state = VersionState(fingerprint, len(served.now().data), secret)
    decode = partial(weights_from_bytes, layout=learner.weights.layout, vocab=drafter.config.target_vocab_size)
    follower = Follower(versions, state, lease, served, learner, worker, decode=decode)
    receiver = QueryReceiver(stream, codec, served, lambda query: worker.ask(lambda: learner.observe(query)))
    exchange = Exchange(
        name=name,
        loop=loop,
        lease=lease,
        stream=stream,
        sender=QuerySender(stream, codec, served, sender=holder, max_queries=max_queries),
        receiver=receiver,
        follower=follower,
        leader=Leader(follower, receiver, name=name),
        lost_after_seconds=lease_seconds,
        niceness=learner.tuning.niceness,
    )
    return worker, exchange


def fingerprint_of(drafter: ServedDrafter, target_identity: str) -> str:
    """Whatever queries and weights must fit: the target, and the drafter's shape, vocabulary and deployed weights."""
    digest = hashlib.sha256(f"{_FORMAT} {target_identity} {drafter.config.to_json()}".encode())
    digest.update(weights_to_bytes(drafter.weights))
    return digest.hexdigest()


def _query_shape(tuning: Tuning, drafter: ServedDrafter) -> QueryShape:
    shape = drafter.config
    return QueryShape(
        width=len(shape.tap_layers) * shape.hidden_size,
        hidden=shape.hidden_size,
        top=min(tuning.target_top, shape.target_vocab_size),
        vocab=shape.target_vocab_size,
        most_tokens=tuning.window_tokens + 1,
        dtype=drafter.weights["lm_head.weight"].dtype,
    )
