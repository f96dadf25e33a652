"""Chaos run of the gateway: `benchmarks/chaos_gateway.py`.

Clients hold conversations through `assay serve` with a server whose answers break by a seeded plan (`plan`, `upstream`, `clients`), while the
store is locked, full or away and processes are killed (`faults`, `processes`). What is stored is then compared with what the clients and the
server saw (`checks`).
"""

from assay.testing.gateway_chaos.faults import FAULTS
from assay.testing.gateway_chaos.run import Settings, chaos

__all__ = ["FAULTS", "Settings", "chaos"]
