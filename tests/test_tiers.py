"""What `make quick`, `make test` and `make test-all` run."""

from __future__ import annotations

import pytest

from tests.conftest import TIERS, chosen
from tests.test_makefile import dry_run, needs_make

CASES = {f"a.py::many[{n}]": set() for n in range(100)} | {
    "a.py::one": set(),
    "b.py::one": {"slow"},
    "c.py::one": {"thorough"},
}


def test_a_tier_runs_a_share_of_every_test() -> None:
    quick, some, every = (chosen(CASES, tier) for tier in TIERS)
    assert quick < some < every == CASES.keys()
    assert [sum("many" in test for test in tier) for tier in (quick, some)] == [
        -(-100 // TIERS[t][0]) for t in ("quick", "test")
    ]
    assert {"a.py::one"} == {t for t in quick if "many" not in t}
    assert {"a.py::one", "b.py::one"} == {t for t in some if "many" not in t}


def test_the_choice_does_not_depend_on_the_order() -> None:
    backwards = dict(reversed(CASES.items()))
    assert all(chosen(backwards, tier) == chosen(CASES, tier) for tier in TIERS)


@needs_make
@pytest.mark.parametrize(("target", "tier"), [("quick", "--tier quick"), ("test", "--tier test"), ("test-all", "")])
def test_targets(target: str, tier: str) -> None:
    last = dry_run(target).rstrip().splitlines()[-1]
    assert last.endswith(f"-m pytest -n 2 --dist worksteal {tier}".rstrip())
