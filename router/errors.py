"""Why a request got no answer, or an incomplete one."""

from cluster.spec.errors import BatonError
from router.request import Cause


class NotReadyError(BatonError):
    """No request can be taken now; names what is missing."""


class QueueFullError(BatonError):
    """No request can be taken before some of the open ones are computed; says how many there are."""

    def __init__(self, message: str, limit: str = "") -> None:
        """limit: the setting that ended the wait for room."""
        self.limit = limit
        super().__init__(message)


class NoAnswerError(BatonError):
    """A replica has not answered in time."""


class RefusedError(BatonError):
    """The router or a replica cannot do what an administrator wants; says which, and why."""


class KeyLimitError(BatonError):
    """The client's key has reached a limit; says which."""

    def __init__(self, message: str, retry_after_s: int, limit: str) -> None:
        """limit: its name in the file of keys."""
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(message)


class ClientLeftError(BatonError):
    """The client closed its connection before the answer was complete."""


class RequestFailedError(BatonError):
    """A request that was taken ended without a complete answer."""

    def __init__(self, cause: Cause, reason: str) -> None:
        self.cause = cause
        super().__init__(reason)
