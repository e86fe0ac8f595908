"""Faults of simulated runs by rounds, and how they are run."""

from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings

STORM = FaultProfile(
    client_kill_every_s=900.0,
    client_return_s=(5.0, 60.0),
    reset_every_s=300.0,
    partition_every_s=900.0,
    partition_s=(10.0, 200.0),
    server_kill_every_s=200.0,
    server_return_s=(2.0, 20.0),
    disk_full_every_s=600.0,
    disk_kills=0.5,
    power_cuts=0.5,
    jitter_s=0.3,
    drop=0.005,
    duplicate=0.003,
    reorder=0.01,
)


def simulated(kind, mode, faults, *, seed=1, hours=0.25, clients=5, every_s=60.0, **more):
    """Run a small simulation to its end, and return it. more: of its class."""
    simulation = kind(SimulationSettings(clients, hours, seed, faults, every_s), mode, **more)
    simulation.run()
    return simulation
