"""The kinds of trained drafters by the name that their files carry and that a server is asked for."""

from drafters.eagle3.kind import EAGLE3
from drafters.falcon.kind import FALCON
from drafters.medusa.kind import MEDUSA
from drafters.mtp.kind import MTP
from drafters.parallel.kind import PARALLEL
from drafters.specblock.kind import SPECBLOCK, TrainedKind

TRAINED_KINDS: dict[str, TrainedKind] = {
    "specblock": SPECBLOCK,
    "parallel": PARALLEL,
    "eagle3": EAGLE3,
    "medusa": MEDUSA,
    "mtp": MTP,
    "falcon": FALCON,
}
