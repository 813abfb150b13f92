"""The record that defines a kind of trained drafter, in this package or in a plug-in."""

from typing import NamedTuple

from drafters.network.config import DrafterConfig, Fields
from drafters.network.form import PublishedForm


class TrainedKind(NamedTuple):
    """A kind of trained drafter: its config class, the default shape for training, and its published forms."""

    config: type[DrafterConfig]
    shape: Fields  # fields of `config.json` in which drafters trained here differ from the defaults
    forms: tuple[PublishedForm, ...] = ()  # file formats of other projects for this kind
