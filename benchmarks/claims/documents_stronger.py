"""`answer_from_documents` by the stronger model: otherwise the measurement `documents`."""

from dataclasses import replace

from claims import documents
from claims.storing import Measured, Setting


def measure(setting: Setting) -> Measured:
    return documents.measure(replace(setting, model=f"embedded:{setting.stronger}"))
