"""A rank of `bagua bench replay`, as bagua/replay/ranks.py starts it."""

import sys

from bagua import config
from bagua.replay import ranks, systems

ranks.answer(systems.measure, config.launch_environment().rank, *sys.argv[1:])
