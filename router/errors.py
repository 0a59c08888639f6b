"""Why a request got no answer, or no whole one."""

from cluster.spec.errors import BatonError
from router.actions import Cause


class NotReadyError(BatonError):
    """No request can be taken now; names what is missing."""


class QueueFullError(BatonError):
    """No request can be taken before some of those at hand are computed; says how many there are."""

    def __init__(self, message: str, limit: str = "") -> None:
        """limit: the setting that bounds the wait for room, once that is over."""
        self.limit = limit
        super().__init__(message)


class NoAnswerError(BatonError):
    """Somebody who was asked has not answered in time: a replica, or another router process."""


class RefusedError(BatonError):
    """Replicas cannot do what an administrator wants; says which, and why."""


class KeyLimitError(BatonError):
    """The client's key has what it may have; says what that is."""

    def __init__(self, message: str, retry_after_s: int, limit: str) -> None:
        """limit: which of them, as in the file of keys."""
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(message)


class ClientLeftError(BatonError):
    """The client closed its connection before the answer was whole."""


class RequestFailedError(BatonError):
    """A request that was taken ended without a whole answer."""

    def __init__(self, cause: Cause, reason: str) -> None:
        self.cause = cause
        super().__init__(reason)
