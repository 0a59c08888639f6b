"""Small worlds of two leaders, and what must hold of any world in the end."""

from cluster.spec.registry import KvOwnership, PageFilter, TransferMode
from cluster.spec.sampling import FinishReason
from tests.fakes.handoff import Client, World
from tests.fakes.paged_ranks import PAGE_SIZE, next_token, sampled_of

SENDING = [
    *((KvOwnership.REPLICATED, mode, page_filter) for mode in TransferMode for page_filter in PageFilter),
    (KvOwnership.SHARDED, TransferMode.ALL_RANKS, PageFilter.MODULAR),
]
"""Where a prefill rank's KV lives, and what of it a rank sends."""


def answer_of(client: Client, num_pages: int) -> list[int]:
    """The tokens that the fake model gives, as far as a pool of so many pages lets it; the first needs no room."""
    tokens = list(client.prompt)
    for _ in range(client.max_tokens - client.num_given):
        tokens.append(next_token(tokens))
    return tokens[len(client.prompt) : max(num_pages * PAGE_SIZE, len(client.prompt) + 1)]


def check(world: World, num_pages: int) -> None:
    """Every client has its tokens, and nothing is held."""
    for client in world.clients.values():
        wanted = answer_of(client, num_pages)
        if client.cancelled:
            assert client.tokens == wanted[: len(client.tokens)]
        else:
            assert client.failure is None, client.failure
            assert client.tokens == wanted
            assert client.finish is FinishReason.LENGTH
        assert client.logprobs == [sampled_of(token_id).logprobs for token_id in client.tokens]
        assert client.cached_tokens in range(0, len(client.prompt), PAGE_SIZE)
    for leader in world.leaders.values():
        assert leader.is_idle()
        load = leader.load()
        assert load.free_pages == load.total_pages == num_pages


def quiet_world(num_pages: int = 40, ownership: KvOwnership = KvOwnership.REPLICATED) -> World:
    return World(
        seed=1,
        cp=2,
        ownership=ownership,
        mode=TransferMode.ALL_RANKS,
        page_filter=PageFilter.MODULAR,
        num_pages=num_pages,
        chunk_tokens=16,
    )


PROMPT = list(range(1, 4 * PAGE_SIZE + 1))
