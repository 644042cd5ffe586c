"""python -m zerotrain: the command line."""

from zerotrain.cli import main

main()
