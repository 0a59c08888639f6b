"""Storage that is unavailable when a worker starts: the worker starts without it and connects later."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from cluster.spec.errors import UserError
from cluster.spec.hicache_config import StorageConfig
from tests.fakes.page_stores import RankStore, page_of, records_of, sizes
from workers.hicache.storage import registry
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import StorageBackend, StorageError
from workers.hicache.storage.registry import OpeningStorage, make_storage

PAGES = [page_of(0)]


class Opener:
    """Opener that fails until a test gives it a result."""

    def __init__(self) -> None:
        self.backend: StorageBackend | None = None
        self.num_tries = 0

    def __call__(self) -> StorageBackend:
        self.num_tries += 1
        if self.backend is None:
            raise StorageError("the disk is not mounted")
        return self.backend


def until(is_true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came")


def test_storage_missing_at_the_start_is_used_once_available(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opener = Opener()
    store = RankStore(OpeningStorage(opener), records_of(sizes())[0])
    assert "starting without storage: the disk is not mounted" in caplog.text
    assert store.write(PAGES) == store.look_up(PAGES) == store.read(PAGES) == [False]
    assert store.failures["error"] == 3
    opener.backend = FileStorage(tmp_path, 1 << 20)
    until(lambda: store.write(PAGES) == [True])
    assert store.read(PAGES) == [True]
    num_tries = opener.num_tries
    store.store.close()
    assert store.read(PAGES) == [False]
    assert opener.num_tries == num_tries


def test_no_request_waits_for_storage_that_takes_long_to_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FIRST_S", 0.01)
    go_on, closed = threading.Event(), list[bool]()

    class Closing(FileStorage):
        def close(self) -> None:
            super().close()
            closed.append(True)

    def open_slowly() -> StorageBackend:
        assert go_on.wait(10.0)
        return Closing(tmp_path, 1 << 20)

    storage = OpeningStorage(open_slowly)
    with pytest.raises(StorageError, match="still being opened"):
        storage.present({"n/aa": 0})
    storage.close()
    go_on.set()
    until(lambda: closed == [True])


def test_figures_do_not_wait_for_an_attempt_that_another_thread_starts() -> None:
    storage, figures = OpeningStorage(Opener()), list[object]()

    class Failed(Future[StorageBackend]):
        def done(self) -> bool:
            storage._attempt = Future()  # it hangs
            return super().done()

    storage._attempt = Failed()
    storage._attempt.set_exception(StorageError("the disk is not mounted"))
    threading.Thread(target=lambda: figures.append(storage.figures()), daemon=True).start()
    until(lambda: figures == [None])


def test_an_impossible_folder_is_refused_and_a_missing_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "kv"):
        config = StorageConfig.model_validate({"backend": "files", "folder": str(folder)})
        with pytest.raises(UserError, match=r"hicache\.storage\.folder: .* cannot be used"):
            make_storage(config, "127.0.0.1")
    with pytest.raises(StorageError, match="cannot be used"):
        FileStorage(Path("/proc/none"), 1)
