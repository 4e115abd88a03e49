"""The fast validator accepts what the JSON schema accepts, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.admission import Refused, check, schema
from slurm_hooks.record import SEVERITIES, worst
from tests.records import record

# The $ of JSON schema's patterns (ECMA 262) is the very end of a text; Python's, which jsonschema
# hands them to unchanged, is also the place before a last line break.
REFERENCE = jsonschema.Draft7Validator(json.loads(json.dumps(schema()).replace('$"', '\\\\Z"')))

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["fault-record/v1", "n3\n", "n3", "", "gpu.x", "1:0", "x" * 5000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "code", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a JSON document."""
    found = [path]
    if isinstance(value, dict):
        found += [p for key in value for p in places(value[key], (*path, key))]
    if isinstance(value, list):
        found += [p for index, item in enumerate(value) for p in places(item, (*path, index))]
    return found


@st.composite
def mutated_records(draw: st.DrawFn) -> Any:
    """A record of which nothing, a value, a key or a whole branch has been changed."""
    document: Any = copy.deepcopy(record().to_dict())
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places(document)))
        if not path:
            continue
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        kind = draw(st.sampled_from(["replace", "remove", "add", "repeat"]))
        if kind == "replace":
            parent[path[-1]] = draw(ANYTHING)
        elif kind == "remove":
            del parent[path[-1]]
        elif kind == "add" and isinstance(parent, dict):
            names = ["gpu", "count", "exit", "detail", "resolution", "extra"]
            parent[draw(st.sampled_from(names))] = draw(ANYTHING)
        elif isinstance(parent, list):
            parent[:] = parent * draw(st.integers(1, 300))
    return document


def accepted(document: Any) -> bool:
    """Whether it is accepted, where only the schema could have been against it."""
    try:
        check(document)
    except Refused as error:
        return "its verdict is" in str(error) or "is no time" in str(error)
    return True


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated_records())
def test_the_compiled_validator_agrees_with_the_reference(document: Any) -> None:
    assert accepted(document) == REFERENCE.is_valid(document)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(SEVERITIES), max_size=6))
def test_every_record_that_a_hook_can_write_is_accepted(severities: list[str]) -> None:
    document = record().to_dict()
    one = document["findings"][0]
    document["findings"] = [{**one, "severity": severity} for severity in severities]
    document["verdict"] = worst(severities)
    check(json.loads(json.dumps(document)))


@pytest.mark.parametrize("name", ["n3\n", "n3/", "", "-n3", "n" * 256, "../n3"])
def test_a_node_name_is_safe_as_a_part_of_a_path(name: str) -> None:
    with pytest.raises(Refused):
        check({**record().to_dict(), "node": name})
