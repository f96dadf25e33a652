"""Numbers as text: no minus sign in front of zero, on no page and in no report."""

import re
from pathlib import Path

import assay
from assay.support.numbers import counted, figure, signed


def test_a_number_that_rounds_to_zero_has_no_minus_sign() -> None:
    assert [figure(value) for value in (None, 0.0, -0.0, -0.0004, -0.0006)] == [
        "–",
        "0.000",
        "0.000",
        "0.000",
        "-0.001",
    ]
    assert [signed(value) for value in (None, 0.0, -0.0, -0.0004, 0.1)] == ["–", "+0.000", "+0.000", "+0.000", "+0.100"]
    assert [figure(1 / 3, 2), signed(-0.4, 0), signed(-0.6, 0)] == ["0.33", "+0", "-1"]


def test_one_thing_is_counted_in_the_singular_and_a_small_amount_without_an_exponent() -> None:
    counts = [
        (1, "calls"),
        (2, "calls"),
        (1200, "tasks"),
        (1.0, "dollars"),
        (2.1e-6, "dollars"),
        (0.1 + 0.2, "dollars"),
    ]
    assert [counted(number, things) for number, things in counts] == [
        "1 call", "2 calls", "1,200 tasks", "1 dollar", "0.0000021 dollars", "0.3 dollars",
    ]  # fmt: skip


def test_no_other_code_writes_a_signed_number() -> None:
    own = re.compile(r":\+\.\d|%\+\.\d")
    source = Path(assay.__file__).parent
    files = [path for kind in ("*.py", "*.html") for path in source.rglob(kind)]
    assert len(files) > 400
    assert [path.name for path in files if own.search(path.read_text(encoding="utf-8"))] == []
