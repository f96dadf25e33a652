"""Times that people type."""

import pytest

from assay.errors import ConfigError
from assay.support.numbers import since


def test_a_relative_time_is_measured_back_from_now() -> None:
    assert [since(text, now=1_000_000.0) for text in ("30m", "12h", "7d")] == [998_200.0, 956_800.0, 395_200.0]
    assert since("99999999d", now=1_000_000.0) == 0.0


def test_a_date_means_midnight_in_local_time() -> None:
    assert since("2026-11-24") - since("2026-11-23") == pytest.approx(86_400, abs=3_600)


@pytest.mark.parametrize("text", ["", "soon", "7", "-1d", "²d", "1.5h", "2026-13-01", "d"])
def test_texts_that_are_no_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="30m, 12h, 7d"):
        since(text)
