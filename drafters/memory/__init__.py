"""Drafts the tokens that followed the same contexts before: in prompt and answer, in the client's prediction, and in
past answers. It needs no training, and joins a network's proposals in one tree."""
