"""Numbers as text: no minus sign in front of zero, on no page and in no report."""

import re
from pathlib import Path

import assay


def test_no_other_code_writes_a_signed_number() -> None:
    own = re.compile(r":\+\.\d|%\+\.\d")
    source = Path(assay.__file__).parent
    files = [path for kind in ("*.py", "*.html") for path in source.rglob(kind)]
    assert len(files) > 400
    assert [path.name for path in files if own.search(path.read_text(encoding="utf-8"))] == []
