"""Public API for `assay judge forget`: removes a person's labels."""

from pathlib import Path
from typing import Any

from assay.support.keywords import takes
from assay.traces import Store
from assay.traces.records import person_digest


@takes()
def forget_rater(rater: str, *, store: str | Path | None = None) -> dict[str, Any]:
    """Removes a rater's labels from the store. `judges`: artifacts of judges that were compiled with them."""
    with Store(store) as opened:
        return {
            "rater": rater,
            "removed": opened.forget_rater(rater),
            "judges": opened.artifacts_of(person_digest(rater)),
        }
