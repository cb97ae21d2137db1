"""`python -m quantload`."""

from quantload.cli import main

main()
