"""The memory: drafts the tokens that followed the same context earlier, in prompt and answer, in the client's
prediction, and in past answers. It needs no training, and can be combined with a network in one tree."""
