"""The exception tree.

AsyncRLError
  + ConfigError       a setting is wrong; names key, value and remedy (also ValueError)
  + WireError         bytes that do not decode to a record (also ValueError)
  + TransportError    a peer cannot be reached, bound or does not answer in time
  | + NoAnswer        a peer was asked and said nothing in time
  + EngineError       a generation engine failed or was refused by the probe
  + TrajectoryError   a response that cannot be used: misaligned or impossible log-probs (also ValueError)
  + RouteError        routes have the wrong shape, range or row count (also ValueError)
  + WeightSyncError   a version could not be published, verified or loaded
  | + VersionGone     nobody offers that version now
  + TaskError         a data set or verifier is unusable (also ValueError)
  + TrainingError     the learner cannot go on (non-finite numbers, nothing to train on)
  + RunError          a child process of a run failed

Each class also inherits the standard error that it refines, so callers may catch either.
"""


class AsyncRLError(Exception):
    """Base of every error raised on purpose by asyncrl."""


class ConfigError(AsyncRLError, ValueError):
    """A setting is unknown, of the wrong type, out of range or contradicts another one."""


class WireError(AsyncRLError, ValueError):
    """Received bytes are not a record of this schema."""


class TransportError(AsyncRLError, RuntimeError):
    """A socket cannot be bound, or a peer did not answer in time."""


class NoAnswer(TransportError):
    """A peer was asked, and said nothing in time."""


class EngineError(AsyncRLError, RuntimeError):
    """A generation engine failed, or the start-up probe refused it."""


class TrajectoryError(AsyncRLError, ValueError):
    """A response cannot be used: its log-probs do not fit its tokens, or no policy can have them."""


class RouteError(AsyncRLError, ValueError):
    """Routes have a wrong shape, expert id or row count."""


class WeightSyncError(AsyncRLError, RuntimeError):
    """A weight version could not be published, verified or loaded."""


class VersionGone(WeightSyncError):
    """Nobody offers this version now: its publisher ended, or dropped it for a newer one."""


class TaskError(AsyncRLError, ValueError):
    """A task, data set or verifier is unusable."""


class TrainingError(AsyncRLError, RuntimeError):
    """The learner cannot go on."""


class RunError(AsyncRLError, RuntimeError):
    """A child process of a run failed."""
