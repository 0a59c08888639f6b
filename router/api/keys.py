"""Who asks: the key that a request carries, and what follows from it."""

from http import HTTPStatus
from typing import Any

from fastapi import Depends
from starlette.requests import Request

from router.api.errors import ApiError
from router.key_ring import ApiKey
from router.service import Service

_CALLER = "baton.caller"
_SCHEME = "bearer"


def check_key(service: Service, request: Request) -> None:
    """Let a request in whose key is known, and remember whose it is.

    Raises:
        ApiError: 401, which does not repeat the key.
    """
    if service.keys.is_open:
        return
    caller = service.keys.find(_given(request))
    if caller is None:
        raise _refused("a known API key is needed, as `Authorization: Bearer KEY`")
    request.scope[_CALLER] = caller


def check_admin(service: Service, request: Request) -> None:
    """Let an administrator in.

    Raises:
        ApiError: 401, or 403 where no administrator's key is set.
    """
    if service.keys.admin_key is None:
        message = "no administrator's key is set; start the cluster with BATON_ADMIN_KEY"
        raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_admin_key")
    if not service.keys.is_admin(_given(request)):
        raise _refused("the administrator's key is needed, as `Authorization: Bearer KEY`")


def key_needed(service: Service) -> Any:
    """For ``dependencies`` of routes: ``check_key``."""

    async def known(request: Request) -> None:
        check_key(service, request)

    return Depends(known)


def admin_key_needed(service: Service) -> Any:
    """For ``dependencies`` of routes: ``check_admin``."""

    async def authorized(request: Request) -> None:
        check_admin(service, request)

    return Depends(authorized)


def caller_of(request: Request) -> ApiKey | None:
    """Whose request it is; None where no key is needed."""
    caller: ApiKey | None = request.scope.get(_CALLER)
    return caller


def priority_of(request: Request, asked: int | None) -> int:
    """The priority of a request: what it asks for, but none before its key's own."""
    caller = caller_of(request)
    if caller is None or caller.priority is None:
        return asked or 0
    return caller.priority if asked is None else max(asked, caller.priority)


def _given(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == _SCHEME else ""


def _refused(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers=headers)
