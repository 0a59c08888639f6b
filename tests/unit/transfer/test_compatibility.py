"""Every mismatch of a pair is refused with an error that names both sides and both values."""

import msgspec
import pytest

from cluster.spec.kv import key_value_group
from cluster.spec.registry import Endpoint, KvOwnership, RankRecord, TransferMode
from tests.fakes.rank_records import make_record, sizes
from tests.unit.transfer.samples import geometry, pool, ticket
from transfer.compatibility import geometry_refusal, refusal, ticket_refusal


def _record(name: str, *, cp: int = 1, tp: int = 1, **changes: object) -> RankRecord:
    layout = pool(2, range(max(1, 4 // tp)), range(2))
    endpoint = Endpoint(backend="shared_memory", session="s", base_address=0, num_bytes=1)
    record = make_record(name, 0, sizes(cp=cp, tp=tp), geometry=geometry(), layout=layout, endpoint=endpoint, build="1")
    return msgspec.structs.replace(record, **changes)


def test_a_fitting_pair_is_not_refused() -> None:
    assert refusal(_record("prefill-0", cp=4, tp=2), _record("decode-1", tp=4)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 128}, "prefill-0 has page size 4, decode-1 has 128; they must be equal"),
        (
            {"groups": (key_value_group(range(2), 4, 3, "bfloat16"),)},
            "prefill-0 has KV groups full_attention (2 layers, 4 heads, k 3 + v 3 float32), "
            "decode-1 has full_attention (2 layers, 4 heads, k 3 + v 3 bfloat16); they must be equal",
        ),
        ({"num_layers": 3}, "prefill-0 has number of layers 2, decode-1 has 3; they must be equal"),
        ({"model": "big"}, "prefill-0 has model tiny, decode-1 has big; they must be equal"),
    ],
)
def test_geometry_differences_are_named(changes: dict[str, object], words: str) -> None:
    assert geometry_refusal("prefill-0", geometry(), "decode-1", geometry(**changes)) == words
    assert refusal(_record("prefill-0"), _record("decode-1", geometry=geometry(**changes))) == words


def test_every_field_of_the_geometry_is_compared() -> None:
    for field in msgspec.structs.fields(type(geometry())):
        changed = {"model": "other", "groups": ()}.get(field.name, 99)
        assert geometry_refusal("a", geometry(), "b", geometry(**{field.name: changed})), field.name


def test_decode_with_cp_is_refused() -> None:
    assert refusal(_record("prefill-0", cp=2), _record("decode-1", cp=2)) == (
        "decode-1 has cp 2; a decode replica must have cp 1"
    )


def test_unequal_settings_are_refused() -> None:
    endpoint = Endpoint(backend="mooncake", session="s", base_address=0, num_bytes=1)
    assert refusal(_record("prefill-0"), _record("decode-1", endpoint=endpoint)) == (
        "prefill-0 has transfer backend shared_memory, decode-1 has mooncake; they must be equal"
    )
    assert refusal(_record("prefill-0"), _record("decode-1", transfer_mode=TransferMode.RANK0)) == (
        "prefill-0 has transfer mode all_ranks, decode-1 has rank0; they must be equal"
    )


def test_sharded_prefill_fits_whole_decode() -> None:
    assert refusal(_record("prefill-0", cp=4, ownership=KvOwnership.SHARDED), _record("decode-1")) is None


def test_sharded_kv_that_cannot_be_sent_is_refused() -> None:
    sharded = _record("prefill-0", cp=2, ownership=KvOwnership.SHARDED)
    rank0 = TransferMode.RANK0
    assert refusal(msgspec.structs.replace(sharded, transfer_mode=rank0), _record("decode-1", transfer_mode=rank0)) == (
        "prefill-0 has transfer mode rank0 and sharded KV, which only all_ranks can send"
    )


def test_sharded_decode_is_refused() -> None:
    assert refusal(_record("prefill-0"), _record("decode-1", ownership=KvOwnership.SHARDED)) == (
        "decode-1 has sharded KV; each rank of a decode replica must hold all pages"
    )


def test_a_ticket_must_cover_the_prompt() -> None:
    assert ticket_refusal(ticket([5, 6], num_held_pages=1), prompt_len=9) is None
    assert ticket_refusal(ticket([5], num_held_pages=1), prompt_len=9) == (
        "decode-1 sent 1 pages and already holds 1; a prompt of 9 tokens needs 3 new pages"
    )
    two_lists = msgspec.structs.replace(ticket([1]), pages=[[1], [2]])
    assert ticket_refusal(two_lists, prompt_len=4) == "decode-1 sent 2 page lists; its KV groups need 1"
