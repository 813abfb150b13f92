"""What a drafter, a draft tree and a verify result are, and the drafters themselves, one folder per kind."""
