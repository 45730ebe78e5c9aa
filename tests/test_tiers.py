"""What `make quick`, `make test` and `make test-all` run."""

from __future__ import annotations

import pytest

from tests.conftest import TIERS, chosen
from tests.test_makefile import dry_run, needs_make

MANY = 100
SLOW, THOROUGH = "tests/test_examples.py::one", "tests/cuda_emulator/test_kernels.py::one"
PLACES = ("tests/a.py", "tests/kernels/a.py")
TESTS = [*(f"{place}::many[{n}]" for place in PLACES for n in range(MANY)), "tests/a.py::one", SLOW, THOROUGH]


def test_a_tier_runs_a_share_of_every_test() -> None:
    quick, some, most, every = (chosen(TESTS, tier) for tier in TIERS)
    assert quick < some < most == every == set(TESTS)
    for name, tier in (("quick", quick), ("test", some)):
        for place, share in zip(PLACES, TIERS[name][:2], strict=True):
            assert sum(test.startswith(f"{place}::many") for test in tier) == -(-MANY // share)
    assert {t for t in quick if "many" not in t} == {"tests/a.py::one"}
    assert {t for t in some if "many" not in t} == {"tests/a.py::one", SLOW}


def test_the_choice_does_not_depend_on_the_order() -> None:
    assert all(chosen(TESTS[::-1], tier) == chosen(TESTS, tier) for tier in TIERS)


@needs_make
@pytest.mark.parametrize(("target", "tier"), [("quick", "--tier quick"), ("test", "--tier test"), ("test-all", "")])
def test_targets(target: str, tier: str) -> None:
    last = dry_run(target).rstrip().splitlines()[-1]
    assert last.endswith(f"-m pytest -n 2 --dist worksteal {tier}".rstrip())


def test_emulated_cases_are_fewer_and_replace_no_others() -> None:
    plain = [f"tests/test_any.py::one[{n}-eager]" for n in range(60)]
    emulated = [f"tests/test_any.py::one[{n}-sm90@emulator]" for n in range(60)]
    kept = {tier: chosen([*plain, *emulated], tier) for tier in TIERS}
    assert all(kept[tier] & set(plain) == chosen(plain, tier) for tier in TIERS)
    assert {tier: len(kept[tier] & set(emulated)) for tier in TIERS} == {"quick": 0, "test": 0, "all": 8, "every": 60}
