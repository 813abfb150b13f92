"""HTTP interface: JSON requests in, JSON and server-sent events out. Handles records and queues, never tensors."""
