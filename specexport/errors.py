"""Errors that a user can act on: each says what came, what was expected and what to do."""


class SpecExportError(Exception):
    """Base of all errors raised on purpose; the command line prints them and exits with 1."""


class CheckpointError(SpecExportError):
    """The checkpoint given to `build` is unreadable, incomplete or of an unsupported kind."""


class BundleError(SpecExportError):
    """The bundle is missing files, was altered, or was written by another version."""


class ConfigError(SpecExportError):
    """An option, or a combination of options, cannot work."""


class RequestError(SpecExportError):
    """A request cannot be honoured: refused at admission, nothing was generated."""


class QueueFullError(RequestError):
    """As many requests wait as may: try again once some have finished."""


class EngineError(SpecExportError):
    """An engine could not be built, or failed while running a step."""
