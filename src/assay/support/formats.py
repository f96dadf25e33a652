"""Stored forms carry a format number. A form of another version is refused, with the way to make it again."""

from assay.errors import AssayError


def check_format(
    what: str, found: object, current: int | str, *, remake: str, error: type[AssayError] = AssayError
) -> None:
    """Refuses a stored form that this version does not write. Nothing converts one form into another.

    Args:
        what: the stored thing, for the message.
        found: its format; whatever was read from the file.
        remake: how to make it again, as an imperative.
    Raises:
        AssayError: of the class `error`; `found` is not `current`.
    """
    if type(found) is type(current) and found == current:
        return
    newer = isinstance(found, int) and isinstance(current, int) and found > current
    way_out = f"Update assay, or {remake}" if newer else f"{remake[0].upper()}{remake[1:]}"
    form = "no format" if found is None else f"format {found!r}"
    raise error(f"{what} has {form}, and this version of assay reads only format {current!r}. {way_out}")
