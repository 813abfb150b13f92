"""Learning while serving: everything that changes a drafter after deployment lives here, beside the engine."""
