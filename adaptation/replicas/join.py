"""Decides, once, whether a learner has others to learn with, and gives it its thread accordingly."""

from dataclasses import dataclass
from functools import partial

from adaptation.assembly import Built, ServedDrafter
from adaptation.build import build_worker
from adaptation.config import AdaptationConfig
from adaptation.replicas.desk import Desk
from adaptation.replicas.solitude import Replicas, Solitude
from adaptation.replicas.standing import InTurn, Standing
from adaptation.worker import Worker


@dataclass(frozen=True, slots=True)
class Joined:
    """The thread that learns, and whom it learns with."""

    worker: Worker
    replicas: Replicas


def join_replicas(config: AdaptationConfig, built: Built, drafter: ServedDrafter, *, target_identity: str) -> Joined:
    """Raises ValueError where there cannot be any others."""
    worker_of = partial(build_worker, config, device=built.weights.train_device, taken_share=built.taken_share)
    if config.redis_url is None:
        worker = worker_of(loop=built.learner)
        return Joined(worker, Solitude(worker))
    try:
        from adaptation.replicas.build import build_exchange  # the package redis is an extra
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: install it with `pip install 'adaptree[redis]'`") from error
    standing = Standing(learns_alone=config.redis_lost == "learn")
    worker = worker_of(loop=InTurn(built.learner, standing))
    desk, url = Desk(built.learner, worker), config.redis_url.get_secret_value()
    return Joined(worker, build_exchange(config, url, built.weights, drafter, desk, standing, target_identity))
