"""The program of a rank of `bagua bench replay`, started by bagua/replay/ranks.py."""

import sys

from bagua import config
from bagua.replay import ranks, systems

ranks.answer(systems.measure, config.launch_environment().rank, *sys.argv[1:])
