"""The names of leaves."""

from bagua.federated.verbs.names import flatten_named


def test_leaves_are_named_by_their_paths_in_the_trees_order():
    names, leaves, _ = flatten_named({"b": [1, (2,)], "a": 3})
    assert list(zip(names, leaves, strict=True)) == [("['b'][0]", 1), ("['b'][1][0]", 2), ("['a']", 3)]
    assert flatten_named(4)[:2] == ([""], [4])
