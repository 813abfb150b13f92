"""Training of drafters on a target's answers: corpus on disk, objective, training loop, evaluation."""
