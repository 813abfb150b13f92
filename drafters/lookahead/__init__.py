"""The drafter that keeps what verification said of paths that were rejected: n-grams, and guesses by position."""
