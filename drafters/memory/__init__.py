"""The drafter that remembers what was said: in the prompt and the answer so far, in the answer that a client predicts,
and in past answers. It needs no training, and joins what a network proposes."""
