"""Routes under ``/admin``: an operator's commands to a running cluster, authorized by the admin key."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from cluster.spec.ids import Peer, Role
from cluster.spec.kv import page_keys
from cluster.spec.messages import Drain, Resume, Wanted
from cluster.spec.tiers import FlushCache, PinPages, UseStorage
from router.api.document import document
from router.api.front import admin_key_needed, read
from router.api_keys import SHARED_SALT
from router.directory import Load
from router.errors import bad_request, refused
from router.preprocess.body import Body
from router.preprocess.intake import pack_token_ids
from router.preprocess.job import Job, JsonText, Route
from router.preprocess.requests import SaltedBody
from router.service import Service

_STRICT = ConfigDict(extra="forbid")
"""Setting that rejects unknown fields: if ``replica`` were misspelled, a command would go to all replicas."""


class TargetRequest(Body):
    """Body of ``POST /admin/...``: the name of a replica, or nothing for the route's default."""

    model_config = _STRICT
    replica: str | None = None


class PinRequest(TargetRequest, SaltedBody):
    model_config = _STRICT
    expected: ClassVar[Mapping[str, str]] = {"prompt": "a string, or a list of token ids; neither may be empty"}
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    api_key: str | None = None
    """Name of the API key whose requests use the prompt; by default, the keys that share their cache."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_BODY_OF_TARGET: dict[str, Any] = {"openapi_extra": document(TargetRequest)}


def routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[admin_key_needed(service)])

    @router.post("/drain", **_BODY_OF_TARGET)
    async def drain(request: Request) -> dict[str, object]:
        """Stop sending new requests to a replica; without a name, stop accepting requests. Open requests continue."""
        return {"draining": await _drain(service, request, Drain())}

    @router.post("/resume", **_BODY_OF_TARGET)
    async def resume(request: Request) -> dict[str, object]:
        """Undo a drain."""
        return {"resumed": await _drain(service, request, Resume())}

    _add_cache_routes(router, service)

    @router.get("/load")
    async def load() -> Response:
        """Return the open and waiting requests: this router process's counts, and each replica's last heartbeat."""
        book = service.requests.load.lines()
        snapshot = service.directory.snapshot
        replicas = {
            entry.replica: {
                "open": book.get((entry.replica, entry.incarnation), Load()),
                "ready": entry.ready,
                "heartbeat": entry.load,
            }
            for entry in (snapshot.replicas if snapshot else ())
        }
        content = {"router": service.state, "replicas": replicas}
        return Response(msgspec.json.encode(content), media_type="application/json")

    return router


def _add_cache_routes(router: APIRouter, service: Service) -> None:
    @router.post("/flush_cache", **_BODY_OF_TARGET)
    async def flush_cache(request: Request) -> dict[str, object]:
        """Drop the cached pages that no request uses, on one replica or all."""
        return {"flushing": await _give(service, request, FlushCache())}

    @router.post("/pin", openapi_extra=document(PinRequest))
    async def pin(request: Request) -> dict[str, object]:
        """Keep a prompt's present and future pages in host memory until it is unpinned or the replica stops.

        The response gives the number of pages that each replica holds now; copying from the device may still continue.
        """
        return await _pin(service, await read(request, PinRequest), is_pinned=True)

    @router.post("/unpin", openapi_extra=document(PinRequest))
    async def unpin(request: Request) -> dict[str, object]:
        """Unpin a prompt. Pages shared with other pinned prompts stay pinned."""
        return await _pin(service, await read(request, PinRequest), is_pinned=False)

    @router.post("/attach_storage", **_BODY_OF_TARGET)
    async def attach_storage(request: Request) -> dict[str, object]:
        """Resume the use of storage, on one replica or all."""
        return {"attaching": await _give(service, request, UseStorage(is_attached=True))}

    @router.post("/detach_storage", **_BODY_OF_TARGET)
    async def detach_storage(request: Request) -> dict[str, object]:
        """Stop using storage, for maintenance. Running jobs finish. Replicas that start later use storage again."""
        return {"detaching": await _give(service, request, UseStorage(is_attached=False))}


async def _pin(service: Service, body: PinRequest, *, is_pinned: bool) -> dict[str, object]:
    given_ids = await _tokenize(service, body.prompt) if isinstance(body.prompt, str) else body.prompt
    prompt_ids = pack_token_ids(service.model, given_ids, "prompt")
    page_size = service.config.kv.page_size
    keys = page_keys(prompt_ids, page_size, _salt(service, body) + body.salt)
    if not keys:
        raise bad_request(
            f"prompt: got {len(prompt_ids)} tokens, less than a page; allowed: at least {page_size} (kv.page_size)",
            "prompt",
        )
    peers, wanted = _peers(service, body), PinPages(keys=keys, is_pinned=is_pinned)
    pinned = {answer.replica: answer.num_pinned for answer in await service.relay.commands.give(peers, wanted)}
    return {"prompt_pages": len(keys), "pinned_pages": pinned, "replicas": [peer.replica for peer in peers]}


async def _tokenize(service: Service, prompt: str) -> list[int]:
    body = msgspec.json.encode({"prompt": prompt})
    made = await service.preprocess.run(Job(route=Route.TOKENIZE, body=body, max_tokens=service.max_tokens), "admin")
    assert isinstance(made, JsonText)
    return msgspec.json.decode(made.text, type=_Tokenized).tokens


def _salt(service: Service, body: PinRequest) -> str:
    salts = {key.name: key.salt for key in service.keys}
    if body.api_key is None:
        return SHARED_SALT if salts else ""
    if body.api_key not in salts:
        allowed = ", ".join(salts) or "none, since no keys are configured"
        raise bad_request(f"api_key: there is no key {body.api_key!r}; allowed: {allowed}", "api_key")
    return salts[body.api_key]


async def _drain(service: Service, request: Request, wanted: Drain | Resume) -> str:
    """Drain or resume a replica, or this router; return its name."""
    body = await read(request, TargetRequest)
    if body.replica is not None:
        await service.relay.commands.give([_peer(service, body.replica)], wanted)
        return body.replica
    if (num := service.share.num_processes) > 1:
        raise refused(f"replica: required with router.processes: {num}; one router process cannot drain the others")
    service.relay.set_paused(isinstance(wanted, Drain))
    return "router"


async def _give(service: Service, request: Request, wanted: Wanted) -> list[str]:
    """Send a command to one replica or all; return their names once all have carried it out."""
    peers = _peers(service, await read(request, TargetRequest))
    await service.relay.commands.give(peers, wanted)
    return [peer.replica for peer in peers]


def _peers(service: Service, body: TargetRequest) -> Sequence[Peer]:
    return service.directory.peers(*Role) if body.replica is None else [_peer(service, body.replica)]


def _peer(service: Service, name: str) -> Peer:
    peers = {str(peer.replica): peer for peer in service.directory.peers(*Role)}
    if name not in peers:
        raise bad_request(f"replica: there is no {name!r}; allowed: {', '.join(peers) or 'none'}", "replica")
    return peers[name]
