"""An unsupported module: importing it, or a module below it, raises an error that names the replacement."""

from .unsupported import NoSuchModule, advice

raise NoSuchModule(advice("model_parallel"))
