"""Learning beside the server, and for other servers: what is built of engine, drafter and learner."""
