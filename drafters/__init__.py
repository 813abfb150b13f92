"""The drafter protocol and its records, and the drafters."""
