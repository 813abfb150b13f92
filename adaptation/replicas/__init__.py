"""Several replicas, one learner: who leads, what is sent to it, and how what it has learnt comes back."""
