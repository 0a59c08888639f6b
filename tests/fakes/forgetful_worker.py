"""Worker that zeroes a checked page when a test asks for it."""

import os
from pathlib import Path
from typing import Any

from tests.chaos.faulty_worker import FOLDER, Saboteur
from workers.worker import Worker


class ForgetfulWorker(Worker):
    """Worker with ``Fault.ZERO``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Saboteur(Path(os.environ[FOLDER])).spoil_checked_pages()
