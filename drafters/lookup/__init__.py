"""The drafter that needs no training: it copies what followed the same words earlier in the text."""
