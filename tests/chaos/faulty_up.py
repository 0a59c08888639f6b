"""``baton`` with workers that can be made to fail: ``python -m tests.chaos.faulty_up up FILE ...``."""

from functools import partial
from unittest.mock import patch

import cluster.launch.tools
from cluster.cli.main import main
from tests.chaos.faulty_worker import FaultyWorker

if __name__ == "__main__":
    faulty = partial(cluster.launch.tools.Tools, worker=FaultyWorker)
    patch.object(cluster.launch.tools, "Tools", faulty).start()
    main()
