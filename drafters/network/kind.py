"""The record of a kind of trained drafter. A module that holds one is a new kind; other packages add theirs by it."""

from typing import NamedTuple

from drafters.network.config import DrafterConfig, Fields
from drafters.network.form import PublishedForm


class TrainedKind(NamedTuple):
    """A kind of trained drafter: its config class, the shape trained here, and its published forms."""

    config: type[DrafterConfig]
    shape: Fields  # non-default fields in `config.json` of a drafter trained here
    forms: tuple[PublishedForm, ...] = ()  # other projects' file formats for this kind
