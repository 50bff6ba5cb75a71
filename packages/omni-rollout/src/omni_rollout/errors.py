"""Errors of this package. Each also is the standard error that a caller without this package would expect.

All of them take one message and nothing else, so they cross process borders (Ray pickles them) unchanged.
"""


class RolloutError(RuntimeError):
    """Base of every error raised by omni_rollout."""


class RolloutConfigError(RolloutError, ValueError):
    """A configuration or a request that no backend could honour."""


class LifecycleError(RolloutError):
    """An operation that the backend's present state does not allow."""


class SyncError(RolloutError):
    """Weights that were sent are not the weights that the backend holds."""


class ReplicaError(RolloutError):
    """A replica answered with an error. The request may be tried again elsewhere."""


class ReplicaDeadError(ReplicaError, ConnectionError):
    """A replica's process is gone or no longer answers."""


class DeadlineError(RolloutError, TimeoutError):
    """A request did not finish in time on any replica that was tried."""


class AbortedError(RolloutError):
    """A call was cancelled before its samples were finished."""


class MissingExtraError(RolloutError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""
