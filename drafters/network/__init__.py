"""SpecBlock: a drafter that proposes K dependent positions per forward (arXiv 2605.07243)."""
