"""Not in this package: importing it, or anything below it, says what to use instead."""

from .left_out import NoSuchModule, advice

raise NoSuchModule(advice("checkpoint"))
