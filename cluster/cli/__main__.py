"""`python -m cluster.cli`: the same as `baton`."""

from cluster.cli.main import main

main()
