"""HTTP in, server-sent events out; knows records and queues, never tensors."""
