"""`python -m cluster.cli`: an alias of `baton`."""

from cluster.cli.main import main

main()
