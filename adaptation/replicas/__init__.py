"""Several replicas with one learner: election of the leader, queries to it, and its versions to all."""
