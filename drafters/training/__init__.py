"""Training of drafters from what a target answered: corpus on disk, objective, fit."""
