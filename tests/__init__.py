"""Tests: one folder per package, mirroring it; `architecture` holds the rules of the house, `e2e` whole answers."""
