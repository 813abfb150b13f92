"""A server that learns, a trainer for other servers, and commands that move learnt drafters."""
