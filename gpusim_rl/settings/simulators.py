"""The simulators, each declared once: where it is, where it runs, what it can do and what it lacks.

This file imports no simulator and no torch: the command line, the configuration and the tools read it. To add a
simulator, write a file with its class (`interface.Sim`), an entry here, and `cfg/sim/<name>.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """What the rest of the package knows of a simulator without importing it."""

    name: str
    """As in `sim=<name>`."""
    module: str
    """Our file that adapts it."""
    cls: str
    """The class in it: made with (scene, num_envs, cfg, device), it follows `interface.Sim`."""
    library: str
    """Module that this file imports."""
    extra: str | None = None
    """Our extra that installs the library; None if it is always installed, or by hand."""
    by_hand: str | None = None
    """What the user installs, where pip cannot."""
    before_torch: str | None = None
    """Module of the library that must be imported before torch."""
    devices: tuple[str, ...]
    """Kinds of device it runs on, as `torch.device.type`."""
    default_on: tuple[str, ...] = ()
    """Kinds of device on which `sim=auto` takes it."""
    plays_on: str
    """Simulator that shows its runs: it runs on every machine where this one does, and has the same physics, except
    that PhysX's runs are shown in MuJoCo."""
    cpu_threads: bool = False
    """Physics runs on CPU threads, in host memory: `sim.num_threads` and `sim.persistent` act on it."""
    uses_warp: bool = False
    """Physics is Warp kernels: `sim.graph` acts on it, and on the CPU it runs on one thread."""
    capturable: bool = True
    """A CUDA graph can hold its steps."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """By feature (see `FEATURES`): what it cannot do, in words that follow its name."""

    @property
    def optional(self) -> bool:
        """Whether its library may be missing."""
        return self.extra is not None or self.by_hand is not None


SIMULATORS: Mapping[str, Simulator] = {
    simulator.name: simulator
    for simulator in (
        Simulator(
            name="mujoco",
            module="gpusim_rl.sim.mujoco",
            cls="MujocoSim",
            library="mujoco",
            devices=("cpu",),
            default_on=("cpu",),
            plays_on="mujoco",
            cpu_threads=True,
        ),
        Simulator(
            name="mjwarp",
            module="gpusim_rl.sim.mjwarp",
            cls="MjwarpSim",
            library="mujoco_warp",
            devices=("cuda", "cpu"),
            default_on=("cuda",),
            plays_on="mujoco",
            uses_warp=True,
        ),
        Simulator(
            name="newton",
            module="gpusim_rl.sim.newton",
            cls="NewtonSim",
            library="newton",
            extra="newton",
            devices=("cuda", "cpu"),
            plays_on="newton",
            uses_warp=True,
        ),
        Simulator(
            name="isaacgym",
            module="gpusim_rl.sim.isaacgym",
            cls="IsaacGymSim",
            library="isaacgym",
            by_hand="Isaac Gym Preview 4 (isaacgym), which NVIDIA distributes for Python 3.6 to 3.8, not by pip",
            before_torch="isaacgym.gymapi",
            devices=("cuda", "cpu"),
            plays_on="mujoco",
            capturable=False,
            lacks={
                "params": "has the same physical parameters in all envs",
                "forces": "has no sensors of forces and accelerations",
            },
        ),
    )
}

FEATURES: Mapping[str, str] = {
    "params": "physical parameters of each env: `sim.param`, randomisation of physics",
    "effort": "force of the actuators on each joint: `Scene.add_effort_sensors`",
    "dynamics": "Jacobian and mass matrix: `Articulation.dynamics`",
    "sensors": "sensors that a robot's file names: `Articulation.sensor`",
    "forces": "of these, sensors of forces and accelerations: accelerometer, force, torque, touch",
    "rays": "rays of lidars and height scans: `RayCaster`",
}
"""What a task may use that not every simulator has, and what it is."""

NO_SIMULATOR = "none"
"""In place of a name, where the envs are of another library."""


def default_simulator(device: str) -> Simulator:
    """What `sim=auto` takes on this kind of device."""
    return next(simulator for simulator in SIMULATORS.values() if device in simulator.default_on)


def lacking(name: str, feature: str) -> str:
    """The message of a simulator that lacks a feature: it names those of pip that have it."""
    with_pip = (other for other in SIMULATORS.values() if other.by_hand is None)
    others = [f"sim={other.name}" for other in with_pip if feature not in other.lacks]
    return f"sim={name} {SIMULATORS[name].lacks[feature]}; try {' or '.join(others)}"
