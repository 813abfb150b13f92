"""`python -m service`: the command line where the package is on the path but not installed."""

from service.cli import main

main()
