"""Weights are identified by their tensors, whose digests are noted for the next start."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from workers.hicache.storage.weights_digest import weights_digest


def weights_folder(folder: Path, **tensors: np.ndarray) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4, "_name_or_path": str(folder)}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def digest_of(tmp_path: Path, folder: Path) -> str:
    return weights_digest(folder, tmp_path / "known")


def test_weights_are_identified_by_tensors_and_not_by_path(tmp_path: Path) -> None:
    ones, zeros = np.ones(5000, np.float32), np.zeros(5000, np.float32)
    half = np.concatenate([ones[:2500], zeros[2500:]])
    one = digest_of(tmp_path, weights_folder(tmp_path / "a", q=ones, k=zeros))
    assert one == digest_of(tmp_path, weights_folder(tmp_path / "b", q=ones, k=zeros))
    others = [
        digest_of(tmp_path, weights_folder(tmp_path / "c", q=zeros, k=zeros)),
        digest_of(tmp_path, weights_folder(tmp_path / "d", q=half, k=zeros)),
        digest_of(tmp_path, weights_folder(tmp_path / "e", k=ones, q=zeros)),
        digest_of(tmp_path, weights_folder(tmp_path / "f", q=ones)),
    ]
    (tmp_path / "b" / "config.json").write_text('{"hidden_size": 8}')
    assert len({one, *others, digest_of(tmp_path, tmp_path / "b")}) == 6


def test_a_few_changed_rows_are_different_weights(tmp_path: Path) -> None:
    rows = np.zeros((400, 64), np.float32)
    base = digest_of(tmp_path, weights_folder(tmp_path / "base", embed=rows))
    rows[300] = 1.0
    assert digest_of(tmp_path, weights_folder(tmp_path / "tuned", embed=rows)) != base


def test_products_in_another_format_do_not_share_kv(tmp_path: Path) -> None:
    folder, known = weights_folder(tmp_path / "a", q=np.zeros(9, np.float32)), tmp_path / "known"
    assert weights_digest(folder, known, "fp8") != weights_digest(folder, known, "") == digest_of(tmp_path, folder)


def test_weights_are_read_again_only_when_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights_folder(tmp_path / "a", q=np.zeros(9, np.float32))
    before = digest_of(tmp_path, folder)
    with monkeypatch.context() as patched:
        patched.setattr("hashlib.file_digest", None)
        assert digest_of(tmp_path, folder) == before
    save_file({"q": np.ones(9, np.float32)}, folder / "model.safetensors")
    assert digest_of(tmp_path, folder) != before
    no_folder = tmp_path / "file"
    no_folder.touch()
    assert weights_digest(folder, no_folder) == digest_of(tmp_path, folder)


@pytest.mark.parametrize("put", [lambda path: path.symlink_to(path.parent / "target"), os.mkfifo])
def test_noted_digests_are_not_read_or_written_through_links_and_pipes(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    folder = weights_folder(tmp_path / "a", q=np.zeros(9, np.float32))
    digest = digest_of(tmp_path, folder)
    paths = list((tmp_path / "known").iterdir())
    for path in paths:
        path.unlink()
        put(path)
    assert digest_of(tmp_path, folder) == digest
    assert {path.name for path in (tmp_path / "known").iterdir()} == {path.name for path in paths}
    assert sorted(path.is_file() for path in paths) == [False, True], "the digest is noted again"


def test_a_downloaded_file_is_identified_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights_folder(tmp_path / "a", q=np.zeros(9, np.float32))
    read = digest_of(tmp_path, folder)
    path, blobs = folder / "model.safetensors", tmp_path / "blobs"
    blobs.mkdir()
    path.symlink_to(path.rename(blobs / hashlib.sha256(path.read_bytes()).hexdigest()))
    monkeypatch.setattr("hashlib.file_digest", None)
    assert weights_digest(folder, tmp_path / "other") == read
