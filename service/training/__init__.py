"""Training a drafter for a target, end to end: answers, features, fit, and the files that come out."""
