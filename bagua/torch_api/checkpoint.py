"""Not supported: importing this module, or anything below it, raises an error that says what to use instead."""

from .unsupported import NoSuchModule, advice

raise NoSuchModule(advice("checkpoint"))
