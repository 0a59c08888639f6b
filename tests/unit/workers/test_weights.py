"""Loading: every tensor arrives, in any file layout and dtype, and whatever does not fit is refused by name."""

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.spec.errors import UserError
from tests.fakes.checkpoints import FAMILIES, make_checkpoint
from workers.engine.weights import CheckpointError, checkpoint_tensors, load_model, torch_dtype
from workers.models.resolve import resolve_model

Tensors = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Apply `change` to the tensors of a folder with one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    stored, loaded = load_file(folder / "model.safetensors"), checkpoint_tensors(load_model(folder))
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    assert ("lm_head.weight" in loaded) is not tied


def test_shards_are_joined(tmp_path: Path) -> None:
    whole = load_model(make_checkpoint(tmp_path / "one", "llama"))
    folder = make_checkpoint(tmp_path / "many", "llama", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    shards = checkpoint_tensors(load_model(folder))
    assert all(torch.equal(shards[name], tensor) for name, tensor in checkpoint_tensors(whole).items())


def test_dtype_is_the_checkpoints_unless_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_model(folder).parameters()} == {torch.bfloat16}
    wide = load_model(folder, dtype=torch.float32)
    assert {tensor.dtype for tensor in wide.parameters()} == {torch.float32}
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in checkpoint_tensors(wide).items())


def test_frequencies_stay_wide_in_a_narrow_model(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama"), dtype=torch.bfloat16)
    assert model.rotary.inv_freq.dtype == torch.float32
    assert model.rotary.inv_freq[0] == 1


def test_nothing_is_trained(tmp_path: Path) -> None:
    assert not any(tensor.requires_grad for tensor in load_model(make_checkpoint(tmp_path, "qwen3")).parameters())


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

    with pytest.raises(CheckpointError, match=r"ties the embeddings.*another lm_head\.weight"):
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
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        load_model(folder)


def test_dtype_names() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="'nn' is not a torch dtype"):
        torch_dtype("nn")


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("given", ["./nowhere", "/no/such/folder", "nowhere", "a/b/c", "~/nowhere"])
def test_what_is_neither_folder_nor_repository_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="no folder on this machine; allowed"):
        resolve_model(given)


def test_a_repository_is_downloaded_without_needless_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    [(repository, patterns)] = asked
    assert repository == "Qwen/Qwen3-0.6B"
    assert "*.safetensors" in patterns
    assert "*.bin" not in patterns


def test_being_offline_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, *, allow_patterns: list[str]) -> str:  # noqa: ARG001
        raise LocalEntryNotFoundError("outgoing traffic has been disabled.\nSet this and that.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError) as caught:
        resolve_model("Qwen/Qwen3-0.6B")
    assert str(caught.value) == (
        "model 'Qwen/Qwen3-0.6B' is no local folder and cannot be fetched from Hugging Face "
        "(outgoing traffic has been disabled.)"
    )
