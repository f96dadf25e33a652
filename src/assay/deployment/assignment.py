"""Which arm a unit gets: by a salted hash, so that it needs no table and is the same on every machine."""

import hashlib

from assay.errors import ConfigError

CHAMPION, CANDIDATE = "champion", "candidate"


def unit_digest(unit: str) -> str:
    """Digest under which a unit is stored: its name may be a person's, and of any length."""
    return hashlib.sha256(unit.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def position(unit: str, salt: str) -> float:
    """Position of a unit in [0, 1): the first 53 bits of the SHA-256 of its salt and name.

    Args:
        unit: digest of a user or conversation, see `unit_digest`.
        salt: of the deployment; another one shuffles all units.
    """
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def arm_of(unit: str, *, salt: str, share: float) -> str:
    """The arm of a unit. Nested: a unit that is on the candidate at a share stays there at every larger one.

    Args:
        share: of the units on the candidate, from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share!r} must be between 0 and 1")
    return CANDIDATE if position(unit, salt) < share else CHAMPION


def probability(arm: str, share: float) -> float:
    """Probability with which a unit is assigned to an arm: the propensity that is stored with its rollouts."""
    return share if arm == CANDIDATE else 1 - share
