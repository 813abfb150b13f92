"""The kinds of trained drafters by the name that their files carry and that a server is asked for."""

from drafters.dflash.kind import DFLASH
from drafters.eagle3.kind import EAGLE3
from drafters.falcon.kind import FALCON
from drafters.jetspec.kind import JETSPEC
from drafters.medusa.kind import MEDUSA
from drafters.mtp.kind import MTP
from drafters.parallel.kind import PARALLEL
from drafters.specblock.kind import SPECBLOCK, TrainedKind
from drafters.treeflash.kind import TREEFLASH

TRAINED_KINDS: dict[str, TrainedKind] = {
    "specblock": SPECBLOCK,
    "parallel": PARALLEL,
    "eagle3": EAGLE3,
    "medusa": MEDUSA,
    "dflash": DFLASH,
    "jetspec": JETSPEC,
    "treeflash": TREEFLASH,
    "mtp": MTP,
    "falcon": FALCON,
}
