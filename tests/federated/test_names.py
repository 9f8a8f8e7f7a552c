"""A placement's key that carries the names of leaves."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.federated.names import flatten_named, named, names_in, selected, without_names

KEY = "clients:3"


@given(st.lists(st.text(max_size=6) | st.text('%|"\\\n7C25', max_size=6), max_size=5))
def test_names_come_back_as_they_were(names):
    key = named(KEY, names)
    assert (names_in(key), without_names(key)) == (names, KEY)
    places = list(range(len(names)))[::-2]
    assert names_in(selected(key, places)) == [names[place] for place in places]


@pytest.mark.parametrize("name", ['a"b', "a\\", "a\nb", "%7C", "|"])
def test_a_key_can_stand_in_a_string_of_cpp(name):
    assert re.fullmatch(r'clients:3\|[^"\\\n|]+', named(KEY, [name]))


def test_a_key_without_names_stays_one():
    assert (names_in(KEY), without_names(KEY), selected(KEY, [1])) == ([], KEY, KEY)


def test_leaves_are_named_by_their_paths_in_the_trees_order():
    names, leaves, _ = flatten_named({"b": [1, (2,)], "a": 3})
    assert list(zip(names, leaves, strict=True)) == [("['b'][0]", 1), ("['b'][1][0]", 2), ("['a']", 3)]
    assert flatten_named(4)[:2] == ([""], [4])
