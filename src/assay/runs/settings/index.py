"""Settings of `assay index`."""

from dataclasses import dataclass

from assay.errors import ConfigError
from assay.support.names import check_name
from assay.support.settings import Settings, setting

_NAME = 64  # characters; the width of the column


@dataclass(frozen=True, kw_only=True)
class IndexSettings(Settings):
    """Settings of `assay.index`."""

    name: str = setting("documents", "Name of the index. A store may have several.")
    passage_chars: int = setting(
        1000,
        "Maximum number of characters of a passage. After a change all files are read again.",
        ge=100,
        le=20_000,
    )
    max_file_mb: int = setting(500, "Maximum size of a file in MiB; larger files are skipped.", ge=1)
    embedder: str | None = setting(
        None,
        "Also store dense vectors: a litellm embedding model (PROVIDER/NAME), or a function from texts to vectors "
        "(file.py:NAME). By default only full-text search.",
        metavar="MODEL",
    )
    remove: bool = setting(False, "Remove the documents of the folder from the index instead.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(check_name(self.name)) > _NAME:
            raise ConfigError(f"name={self.name!r} must have at most {_NAME} characters")
        if self.remove and (others := self.changed("passage_chars", "max_file_mb", "embedder")):
            raise ConfigError(f"{others[0]}={getattr(self, others[0])!r} would have no effect with remove=True")
