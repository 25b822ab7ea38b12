"""`python -m penstock`."""

from penstock.command.cli import run

run()
