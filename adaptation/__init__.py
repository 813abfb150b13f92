"""Learning while serving: everything that changes a drafter after deployment. Imports nothing of the engine."""
