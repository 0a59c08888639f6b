"""Why a request got no answer, or no whole one."""

from cluster.spec.errors import BatonError
from router.flight import Cause


class NotReadyError(BatonError):
    """No request can be taken now; names what is missing."""


class QueueFullError(BatonError):
    """No request can be taken before some of those at hand are computed; says how many there are."""


class ClientLeftError(BatonError):
    """The client closed its connection before the answer was whole."""


class RequestFailedError(BatonError):
    """A request that was taken ended without a whole answer."""

    def __init__(self, cause: Cause, reason: str) -> None:
        self.cause = cause
        super().__init__(reason)
