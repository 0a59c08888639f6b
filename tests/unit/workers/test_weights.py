"""Loading weights: every tensor arrives from any file layout and dtype, and errors name each mismatch."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.spec.config import ParallelConfig
from cluster.spec.errors import UserError
from tests.fakes.checkpoints import DENSE, FAMILIES, MOE, make_checkpoint
from tests.fakes.thread_layout import tp_groups
from workers.engine import checkpoint_files
from workers.engine.checkpoint_files import CheckpointError
from workers.engine.weights import check_weights, load_model
from workers.models.decoder import DecoderModel
from workers.models.resolve import DESCRIPTION, resolve_model
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import ModelGroups

Tensors = dict[str, Tensor]
NO_BACKEND: Any = SimpleNamespace(in_background=False)
"""Backend of a group in which nothing is computed."""


def tp_rank(rank: int, tp: int) -> ModelGroups:
    return tp_groups(Communicator("tp", rank, tp, NO_BACKEND))


def tensors_of(model: DecoderModel) -> Tensors:
    """Return the loaded tensors by name in the checkpoint."""
    return {name: part.plain for name, part in model.weights().items()}


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Apply ``change`` to the tensors of a folder with one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    stored, loaded = load_file(folder / "model.safetensors"), tensors_of(load_model(folder))
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    assert ("lm_head.weight" in loaded) is not tied


def test_shards_are_joined(tmp_path: Path) -> None:
    whole = load_model(make_checkpoint(tmp_path / "one", "llama"))
    folder = make_checkpoint(tmp_path / "many", "llama", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    shards = tensors_of(load_model(folder))
    assert all(torch.equal(shards[name], tensor) for name, tensor in tensors_of(whole).items())


class Reads:
    """Wrapper of the safetensors library that counts the elements read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.elements: dict[str, int] = {}

        @contextmanager
        def counted(file: Path, framework: str) -> Iterator[Any]:
            with safe_open(file, framework=framework) as tensors:
                yield SimpleNamespace(keys=tensors.keys, get_slice=lambda name: self._slice(name, tensors))

        monkeypatch.setattr(checkpoint_files, "safe_open", counted)

    def _slice(self, name: str, tensors: Any) -> Any:
        part = tensors.get_slice(name)

        class Slice:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(_, index: tuple[slice, ...]) -> Tensor:  # noqa: N805 - self is the reader
                read: Tensor = part[index]
                self.elements[name] = self.elements.get(name, 0) + read.numel()
                return read

        return Slice()


ODD: dict[str, Any] = {
    "vocab_size": 251,
    "intermediate_size": 97,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("family", DENSE)
def test_each_tp_rank_reads_only_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tp: int
) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=False, **ODD)
    stored = load_file(folder / "model.safetensors")
    reads = Reads(monkeypatch)
    ranks = [tensors_of(load_model(folder, groups=tp_rank(rank, tp))) for rank in range(tp)]
    for name, tensor in stored.items():
        is_kv = "k_proj" in name or "v_proj" in name
        is_whole = name.endswith("norm.weight") or name.endswith("o_proj.bias") or name.endswith("down_proj.bias")
        copies = tp if is_whole else max(1, tp // 2) if is_kv else 1
        assert reads.elements[name] == copies * tensor.numel(), name
        parts = [part[name] for part in ranks]
        if not is_whole:
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
            joined = torch.cat(parts[:: copies if is_kv else 1], dim=dim)
            assert torch.equal(joined.narrow(dim, 0, tensor.shape[dim]), tensor), name
            assert not joined.narrow(dim, tensor.shape[dim], joined.shape[dim] - tensor.shape[dim]).any(), name


@pytest.mark.parametrize("family", MOE)
def test_each_rank_reads_only_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder, reads = make_checkpoint(tmp_path, family), Reads(monkeypatch)
    stored, parallel = load_file(folder / "model.safetensors"), ParallelConfig(tp=4, ep=2)
    for rank in range(4):
        load_model(folder, groups=replace(tp_rank(rank, 4), parallel=parallel))
    for name, tensor in stored.items():
        if ".experts." in name:
            assert reads.elements[name] == tensor.numel(), name
        elif "gate.weight" in name:
            assert reads.elements[name] == 4 * tensor.numel(), name


def test_an_extra_expert_is_named(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = torch.zeros(2)

    folder = rewrite(make_checkpoint(tmp_path, "qwen3_moe"), add)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.mlp\.experts\.8\.up_proj"):
        load_model(folder)


def test_dtype_is_the_checkpoints_unless_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_model(folder).parameters()} == {torch.bfloat16}
    wide = load_model(folder, dtype=torch.float32)
    assert {tensor.dtype for tensor in wide.parameters()} == {torch.float32}
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in tensors_of(wide).items())


def test_frequencies_stay_wide_in_a_narrow_model(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama"), dtype=torch.bfloat16)
    assert model.rotary.inv_freq.dtype == torch.float32
    assert model.rotary.inv_freq[0] == 1


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert load_model(rewrite(make_checkpoint(tmp_path, "llama"), add)).config.num_layers == 2


def test_a_stored_copy_of_tied_embeddings_must_be_a_copy(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)

    def add_copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert load_model(rewrite(folder, add_copy)).lm_head is not None

    def spoil(tensors: Tensors) -> None:
        tensors["lm_head.weight"][3, 4] += 1

    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.*different values"):
        load_model(rewrite(folder, spoil))


def test_all_misfits_are_named_at_once(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 95)

    with pytest.raises(CheckpointError) as caught:
        load_model(rewrite(make_checkpoint(tmp_path, "llama"), spoil))
    message = str(caught.value)
    assert "missing: model.norm.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "wrong shape: model.layers.1.mlp.down_proj.weight is [64, 95] but should be [64, 96]" in message


def test_long_lists_of_misfits_are_shortened(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight.* and \d+ more"):
        load_model(rewrite(folder, lambda tensors: tensors.clear()))


def test_a_file_that_is_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    os.truncate(folder / "model.safetensors", 40 << 30)
    refusal = RuntimeError("unable to mmap 42949672960 bytes from file: Cannot allocate memory (12)")
    monkeypatch.setattr(checkpoint_files, "safe_open", Mock(side_effect=refusal))
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(40 GiB\) cannot be mapped into memory; .*5GB"):
        check_weights(folder)


def test_damaged_absent_and_missing_files_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "shards", "llama", max_shard_size="60KB")
    absent = min(folder.glob("*.safetensors"))
    absent.unlink()
    with pytest.raises(CheckpointError, match=f"lacks files .*{absent.name}"):
        load_model(folder)

    folder = make_checkpoint(tmp_path / "single", "llama")
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_model(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"a pointer of Git LFS, not the weights; `git lfs pull` fetches them$"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Is a directory$"):
        load_model(folder)
    (folder / "model.safetensors").rmdir()
    with pytest.raises(CheckpointError, match=r"contains no weights.*index.json$"):
        load_model(folder)
    for name in ("pytorch_model.bin", "q4.gguf"):
        (folder / name).touch()
    with pytest.raises(CheckpointError, match=r"; found: pytorch_model.bin, q4.gguf, which Baton does not read$"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        load_model(folder)


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("given", ["./nowhere", "/no/such/folder", "nowhere", "a/b/c", "~/nowhere"])
def test_a_name_that_is_neither_folder_nor_repository_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"^model\.path: got .*, which is not a folder; allowed: "):
        resolve_model(given)


@pytest.mark.parametrize(("files", "weights"), [((), ["model-00001-of-00002.safetensors"]), ((DESCRIPTION,), [])])
def test_a_repository_is_downloaded_without_needless_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[tuple[str, ...], ...], weights: list[str]
) -> None:
    asked: list[str] = []
    needless = ["consolidated.safetensors", "original/consolidated.00.pth", "original/params.json", "pytorch_model.bin"]

    def download(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        offered = ["config.json", "model-00001-of-00002.safetensors", *needless]
        allowed = [name for name in offered if any(fnmatch(name, pattern) for pattern in allow_patterns)]
        asked.append(repository)
        asked.extend(name for name in allowed if not any(fnmatch(name, pattern) for pattern in ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("Qwen/Qwen3-0.6B", *files) == tmp_path
    assert asked == ["Qwen/Qwen3-0.6B", "config.json", *weights]


def test_a_cache_folder_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError) as caught:
        resolve_model("recall")
    where = f"{tmp_path}/file/cache: Not a directory"
    assert str(caught.value) == f"BATON_CACHE_DIR: cannot write to {where}; allowed: a writable folder with free space"


def test_a_disk_that_becomes_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # the weights are larger
    try:
        with pytest.raises(UserError) as caught:
            resolve_model("recall")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = f"BATON_CACHE_DIR: cannot write to {tmp_path}: File too large; allowed: a writable folder with free space"
    assert str(caught.value) == message
    assert [*tmp_path.iterdir()] == []


def test_being_offline_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **_: list[str]) -> str:  # noqa: ARG001
        raise LocalEntryNotFoundError("outgoing traffic has been disabled.\nSet this and that.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError) as caught:
        resolve_model("Qwen/Qwen3-0.6B")
    assert str(caught.value) == (
        "model 'Qwen/Qwen3-0.6B' is not a local folder and cannot be fetched from Hugging Face "
        "(offline? outgoing traffic has been disabled.)"
    )
