"""`python -m penstock`."""

from penstock.cli import run

run()
