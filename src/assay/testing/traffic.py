"""Traffic with known truth for simulated deployments (`assay deploy simulate`)."""

from assay.deployment.simulation import SimulatedDeployment, SimulationReport, simulate
from assay.deployment.traffic import Traffic

__all__ = ["SimulatedDeployment", "SimulationReport", "Traffic", "simulate"]
