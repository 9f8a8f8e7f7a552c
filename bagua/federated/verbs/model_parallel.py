"""Model parallelism inside of a client: the ranks of a group hold shards of every client's model.

The pair of operators that tensor parallelism is written in (Megatron-LM, arXiv 1909.08053, names them f and g), as
transforms of torch.func and torch.compile see them: the group is a placement with one client on each rank, so they are
the verbs' operators. Under map_fn one collective serves all clients of this rank.
"""

from __future__ import annotations

from bagua.distributed.process_group import ProcessGroup
from bagua.federated.verbs.operators import NOT_SENT
from bagua.federated.verbs.placement import mapping, shards
from bagua.federated.verbs.verbs import Tree, across, check_tensors


def copy_to_group(value: Tree, group: ProcessGroup) -> Tree:
    """The values, which are equal on the group's ranks, before each rank computes another part with them.

    Forward does not communicate; cotangents, one part from each rank, are added up over the ranks.

    Args:
        value: a pytree of tensors.
        group: ranks that hold the same clients, or any outside of a client function; this rank is one of them.

    Returns:
        Tensors of the same structure, shapes and dtypes.

    Example:
        >>> import bagua, torch
        >>> from bagua import federated
        >>> bagua.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> model = bagua.new_group([0])
        >>> def mlp(x, w1, w2):  # this rank's columns of w1 and rows of w2
        ...     h = torch.relu(federated.copy_to_group(x, model) @ w1)
        ...     return federated.reduce_from_group(h @ w2, model)
        >>> mlp(torch.ones(2), torch.ones(2, 3), torch.ones(3, 1))
        tensor([6.])
        >>> bagua.destroy_process_group()

    Raises:
        InvalidArgument: a value is no tensor, this rank is not in the group, or its ranks hold other clients; where
            derivatives are first taken, on all ranks, theirs differ in program, clients, names or shapes.
    """
    return _over("broadcast", "copy_to_group", value, group)


def reduce_from_group(value: Tree, group: ProcessGroup) -> Tree:
    """The sums of the values over the group's ranks, which each of them holds then: one collective for all of a dtype.

    Cotangents, which are equal on the ranks, go back as they are, without communication.

    Args:
        value: a pytree of tensors, of the same shapes on all ranks.
        group: as of ``copy_to_group``.

    Raises:
        InvalidArgument: as copy_to_group; on all ranks, they differ in program, clients, names or shapes.
    """
    return _over("reduce_sum", "reduce_from_group", value, group)


def _over(operator: str, verb: str, value: Tree, group: ProcessGroup) -> Tree:
    return across(operator, check_tensors(value, verb), shards(group, mapping()), NOT_SENT)
