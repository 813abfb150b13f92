"""What drafting gained, kept from one start of a server to the next."""

import json
import logging
import time
from pathlib import Path

from service.engine.budget import BudgetPolicy
from service.engine.costs.measuring import write_whole

logger = logging.getLogger(__name__)


def restore_gains(policy: BudgetPolicy, file: Path, now: float | None = None) -> None:
    """Let the policy begin with what was kept, if anything was, less sure by its age. A file that is not what
    `keep_gains` wrote is named in the log and left out."""
    try:
        content = json.loads(file.read_text())
        policy.restore(content["state"], max(0.0, (now or time.time()) - float(content["saved"])))
        logger.info("what drafting gained before the last stop is known from %s", file)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("gains in %s cannot be read (%s): drafting is learnt anew", file, error)


def keep_gains(policy: BudgetPolicy, file: Path) -> None:
    """Write down what the policy knows of drafting, for the next start."""
    write_whole(file, {"saved": time.time(), "state": policy.state()})
