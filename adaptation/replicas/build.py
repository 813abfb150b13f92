"""Puts the side of one replica together: unpacks the configuration into the parts that talk to the others.

Whether there are others at all is decided in `adaptation/replicas/join.py`.
"""

import hashlib
import os
import platform
import random
import secrets
import time

from pydantic import SecretStr

from adaptation.assembly import ServedDrafter
from adaptation.config import AdaptationConfig
from adaptation.replicas.backoff import Backoff
from adaptation.replicas.belief import Belief
from adaptation.replicas.board import Board
from adaptation.replicas.desk import Desk
from adaptation.replicas.exchange import Exchange
from adaptation.replicas.following import Following
from adaptation.replicas.hearing import Hearing
from adaptation.replicas.leading import Leading
from adaptation.replicas.lease import Claim, Lease, NeverLeads
from adaptation.replicas.outbox import Outbox
from adaptation.replicas.redis_store import RedisStore
from adaptation.replicas.served import ServedWeights, weights_as_bytes
from adaptation.replicas.signature import NoSecret, SharedSecret, Signature
from adaptation.replicas.standing import Standing
from adaptation.replicas.stream import QueryStream
from adaptation.replicas.wire import QueryShape, Wire
from adaptation.weights import DrafterWeights

_FORMAT = 2
_COMMANDS_PER_LEASE = 2  # that may fail before a lease has run out
_MIB = 1 << 20
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 2.0


def build_exchange(
    config: AdaptationConfig,
    url: str,
    weights: DrafterWeights,
    drafter: ServedDrafter,
    desk: Desk,
    standing: Standing,
    target_identity: str,
) -> Exchange:
    """Raises ValueError for a URL that is none."""
    store = RedisStore(url, timeout_seconds=config.redis_lease_seconds / _COMMANDS_PER_LEASE)
    name = f"{platform.node()}:{os.getpid()}"
    holder = f"{name}:{secrets.token_hex(8)}"  # no other start of any process has this name
    fingerprint = fingerprint_of(drafter, target_identity)
    prefix = f"adaptree:{fingerprint[:16]}"
    signature = _signature(config.redis_secret)
    clock = time.monotonic
    served = ServedWeights(weights)
    board = Board(store, prefix, name=holder)
    claim = _claim(config, store, board, holder)
    belief = Belief(fingerprint, len(served.now().data), signature)
    wire = Wire(fingerprint, _shape(config, drafter), signature)
    stream = QueryStream(store, prefix, name=holder, most_letters=config.redis_queries)
    following = Following(
        board, belief, claim, served, desk, layout=weights.layout, vocab=drafter.config.target_vocab_size, clock=clock
    )
    hearing = Hearing(stream, wire, served, desk)
    outbox = Outbox(
        stream,
        wire,
        served,
        sender=holder,
        most_waiting=config.redis_queries,
        most_bytes=config.redis_query_mib * _MIB,
    )
    return Exchange(
        name=name,
        standing=standing,
        claim=claim,
        stream=stream,
        outbox=outbox,
        hearing=hearing,
        following=following,
        leading=Leading(board, belief, following, hearing, served, desk, signature, name=name, clock=clock),
        belief=belief,
        served=served,
        desk=desk,
        backoff=Backoff(
            first_seconds=_FIRST_WAIT_SECONDS, most_seconds=_LONGEST_WAIT_SECONDS, rng=random.Random(holder)
        ),
        patience_seconds=config.redis_lease_seconds,
        niceness=config.train_niceness,
        clock=clock,
    )


def fingerprint_of(drafter: ServedDrafter, target_identity: str) -> str:
    """Whatever queries and weights must fit: the target, and the drafter's shape, vocabulary and deployed weights."""
    digest = hashlib.sha256(f"{_FORMAT} {target_identity} {drafter.config.to_json()}".encode())
    digest.update(weights_as_bytes(drafter.weights))
    return digest.hexdigest()


def _signature(secret: SecretStr | None) -> Signature:
    return NoSecret() if secret is None else SharedSecret(secret.get_secret_value())


def _claim(config: AdaptationConfig, store: RedisStore, board: Board, holder: str) -> Claim:
    if config.redis_role == "follower":
        return NeverLeads(store, board.epoch_key)
    return Lease(
        store,
        board.lease_key,
        board.epoch_key,
        name=holder,
        seconds=config.redis_lease_seconds,
        clock=time.monotonic,
    )


def _shape(config: AdaptationConfig, drafter: ServedDrafter) -> QueryShape:
    shape = drafter.config
    return QueryShape(
        width=len(shape.tap_layers) * shape.hidden_size,
        hidden=shape.hidden_size,
        top=min(config.target_top, shape.target_vocab_size),
        vocab=shape.target_vocab_size,
        most_tokens=config.window_tokens + 1,
        dtype=drafter.weights["lm_head.weight"].dtype,
    )
