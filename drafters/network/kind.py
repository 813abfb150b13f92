"""The record of a kind of trained drafter. A module that holds one is a new kind; other packages add theirs by it."""

from typing import NamedTuple

from drafters.network.config import DrafterConfig, Fields
from drafters.network.form import PublishedForm


class TrainedKind(NamedTuple):
    """A kind of trained drafter."""

    config: type[DrafterConfig]
    shape: Fields  # of the `config.json` of a drafter that is trained here, where it differs from the defaults
    forms: tuple[PublishedForm, ...] = ()  # in which others publish drafters of this kind
