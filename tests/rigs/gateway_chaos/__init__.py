"""Chaos run of the gateway: `benchmarks/chaos_gateway.py`.

Clients hold conversations through `assay serve` with a model server whose responses fail according to a seeded plan
(`plan`, `upstream`, `clients`). Meanwhile the store is locked, full or unavailable, and processes are killed (`faults`,
`processes`). Then the stored rollouts are compared with the records of the clients and the server (`checks`).
"""

from rigs.gateway_chaos.faults import FAULTS
from rigs.gateway_chaos.run import Settings, chaos

__all__ = ["FAULTS", "Settings", "chaos"]
