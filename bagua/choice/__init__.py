"""``algorithm="auto"``: the fastest way to train of a class of risk, recorded, predicted and tried in the training.

``with_bagua`` makes the ``Chooser``; what it has chosen is ``model.bagua.choice``.
"""

from bagua.choice.chooser import Choice, Chooser
from bagua.choice.prediction import Row
from bagua.data_parallel import wrap

__all__ = ["Choice", "Row"]

wrap.make_chooser = Chooser
