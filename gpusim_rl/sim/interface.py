"""What a task may ask of a simulator: the protocols that every simulator of `simulators.py` follows.

All tensors are float32 (masks are bool) on `Sim.device`, in SI units. Quaternions are wxyz, unit length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.sim.params import Param
from gpusim_rl.sim.scene import Scene


def not_finite(tensors: Iterable[Tensor]) -> Bool[Tensor, " envs"]:
    """Returns the rows in which a number of any of the tensors, [envs, ...] each, is NaN or infinite."""
    # 0 * x is NaN there, a sum hands NaN on, and NaN is not 0
    return functools.reduce(torch.add, ((0.0 * x).flatten(1).sum(dim=1) for x in tensors)) != 0.0


class Frames(Protocol):
    """Some frames on bodies of one articulation in every world; up to date whenever they are read."""

    @property
    def pos(self) -> Float[Tensor, "envs frames 3"]:
        """Positions of the origins [m], world frame."""
        ...

    @property
    def quat(self) -> Float[Tensor, "envs frames 4"]:
        """Orientations, wxyz."""
        ...

    @property
    def lin_vel(self) -> Float[Tensor, "envs frames 3"]:
        """Velocities of the origins [m/s], world frame."""
        ...

    @property
    def ang_vel(self) -> Float[Tensor, "envs frames 3"]:
        """Angular velocities [rad/s], world frame."""
        ...


class Sites(Frames, Protocol):
    """Some sites of one articulation: points with axes on its bodies."""


class Bodies(Frames, Protocol):
    """Some bodies of one articulation; their frames are those of the file."""

    @property
    def wrench(self) -> Float[Tensor, "envs bodies 6"]:
        """Force [N] and torque [N m] that `apply_wrench` has set, as a copy."""
        ...

    def apply_wrench(
        self, force: Float[Tensor, "envs bodies 3"], torque: Float[Tensor, "envs bodies 3"] | None = None
    ) -> None:
        """Lets a force [N] and a torque [N m], world frame, act at the bodies' centres of mass until set again.

        A reset sets both to zero. For thrust, wind and pushes.

        Raises:
            TaskError: One of them has another shape.
        """
        ...


class Sensor(Protocol):
    """One sensor in every world."""

    size: int
    """Numbers that it gives: 3 of a gyro, 4 of an orientation, 1 of a touch sensor or a rangefinder."""

    @property
    def data(self) -> Float[Tensor, "envs size"]:
        """What it reads in the current state, under the controls and forces of the last step.

        In MuJoCo's units: m, m/s, m/s^2, rad/s, N, N m; orientations wxyz. An accelerometer at rest reads 9.81 m/s^2
        upwards, and in free fall 0. A rangefinder that meets nothing reads -1.
        """
        ...


class Rays(Protocol):
    """Rays in every world, as many in each."""

    def cast(
        self, origin: Float[Tensor, "envs rays 3"], direction: Float[Tensor, "envs rays 3"]
    ) -> Float[Tensor, "envs rays"]:
        """Returns the distance to what each ray meets first, in the state that `Sim.step` or `Sim.refresh` has left.

        Args:
            origin: Origins of the rays [m], world frame.
            direction: Directions of the rays, world frame, of any length.

        Returns:
            Distances in lengths of `direction`; -1 where a ray meets nothing. A plane has no end.

        Raises:
            TaskError: One of them has another shape.
        """
        ...


class Contacts(Protocol):
    """Net contact wrench on some bodies: what acted in the last physics step.

    It is zero after a reset: forces at a newly written state would cost another forward pass of all envs.
    """

    @property
    def force(self) -> Float[Tensor, "envs bodies 3"]:
        """Net contact force on the body [N], world frame."""
        ...

    @property
    def torque(self) -> Float[Tensor, "envs bodies 3"]:
        """Net contact torque about the body's origin [N m], world frame."""
        ...

    def in_body_frame(self) -> Float[Tensor, "envs bodies 6"]:
        """Returns force [N] and torque [N m] in the body's own frame, as a force sensor there would report them."""
        ...


class Dynamics(Protocol):
    """How an articulation moves by its joints, a free root held still; up to date whenever it is read."""

    @property
    def jacobian(self) -> Float[Tensor, "envs 6 joints"]:
        """Velocity [m/s] and angular velocity [rad/s] of a body's origin, world frame, by unit velocities of joints."""
        ...

    @property
    def mass_matrix(self) -> Float[Tensor, "envs joints joints"]:
        """Inertia that accelerating joints feel, their armature included [kg m^2; kg for slides]."""
        ...


class Articulation(Protocol):
    """What `Scene.add` made of one file, in every world. State tensors may be views: read, never write."""

    name: str
    joint_names: list[str]
    """Its hinges and slides, in the file's order."""
    body_names: list[str]
    actuator_names: list[str]
    """What drives it, in the order of `actuate`: the file's actuators, then those of `Scene.add_actuators`."""
    joint_limits: Float[Tensor, "joints 2"]
    """Lower and upper limit of each joint [rad or m]; infinite where it has none.

    Rounded inwards: a joint that is set to it is not beyond the limit of the model, which is float64.
    """
    control_limits: Float[Tensor, "actuators 2"]
    """Lower and upper limit of each control, in its actuator's units; infinite where it has none."""
    default_joint_pos: Float[Tensor, " joints"]
    """Joint positions of the file's reference pose [rad or m]."""
    default_root_pos: Float[Tensor, " 3"]
    default_root_quat: Float[Tensor, " 4"]

    @property
    def root_pos(self) -> Float[Tensor, "envs 3"]:
        """Position of the root body [m], world frame."""
        ...

    @property
    def root_quat(self) -> Float[Tensor, "envs 4"]:
        """Orientation of the root body, wxyz."""
        ...

    @property
    def root_lin_vel(self) -> Float[Tensor, "envs 3"]:
        """Velocity of the root body's origin [m/s], world frame."""
        ...

    @property
    def root_ang_vel(self) -> Float[Tensor, "envs 3"]:
        """Angular velocity of the root body [rad/s], world frame."""
        ...

    @property
    def root_ang_vel_local(self) -> Float[Tensor, "envs 3"]:
        """Angular velocity of the root body [rad/s], in its own frame."""
        ...

    @property
    def joint_pos(self) -> Float[Tensor, "envs joints"]:
        """Joint positions [rad or m]."""
        ...

    @property
    def joint_vel(self) -> Float[Tensor, "envs joints"]:
        """Joint velocities [rad/s or m/s]."""
        ...

    @property
    def joint_effort(self) -> Float[Tensor, "envs joints"]:
        """Force of the actuators on each joint in the last physics step [N m or N]; zero after a reset.

        See `Scene.add_effort_sensors`.
        """
        ...

    def bodies(self, names: Sequence[str]) -> Bodies:
        """Selects bodies; call it once, in the task's `__init__`, so that the simulator computes them."""
        ...

    def contacts(self, names: Sequence[str]) -> Contacts:
        """Selects bodies that have a contact sensor (`Scene.add_contact_sensor`)."""
        ...

    def sites(self, names: Sequence[str]) -> Sites:
        """Selects sites; call it once, in the task's `__init__`, as `bodies`.

        Raises:
            TaskError: There is no such site.
        """
        ...

    def sensor(self, name: str) -> Sensor:
        """Returns a sensor of the articulation's file, or of `Scene.add_sensor`, by its name.

        Call it once, in the task's `__init__`: a simulator computes no sensor of a file that no task has asked for. The
        sensors of positions and velocities (gyro, frame position, rangefinder, ...) then cost about as much as the
        poses of bodies. Those of forces and accelerations (accelerometer, force, torque, touch, actuator force) cost
        the forward dynamics, about one physics step for each control step.

        Raises:
            TaskError: There is no such sensor.
        """
        ...

    def dynamics(self, body: str) -> Dynamics:
        """Returns mass matrix, and Jacobian of one body; call it once, in the task's `__init__`, as `bodies`.

        They are of the scene's masses, not of masses that were changed in some worlds.

        Raises:
            TaskError: There is no such body, or the articulation has no joints.
        """
        ...

    def actuate(self, control: Float[Tensor, "envs actuators"]) -> None:
        """Sets the controls of the actuators, in the order of `actuator_names`; they hold until set again.

        Raises:
            TaskError: They have another shape. One row for all envs, or one number for all actuators, is not stretched.
        """
        ...

    def set_joint_effort(self, effort: Float[Tensor, "envs joints"]) -> None:
        """Sets an additional force on each joint [N m or N]; it holds until set again.

        Raises:
            TaskError: It has another shape.
        """
        ...

    def set_state(
        self,
        where: Bool[Tensor, " envs"],
        *,
        root_pos: Float[Tensor, "envs 3"] | None = None,
        root_quat: Float[Tensor, "envs 4"] | None = None,
        root_lin_vel: Float[Tensor, "envs 3"] | None = None,
        root_ang_vel: Float[Tensor, "envs 3"] | None = None,
        joint_pos: Float[Tensor, "envs joints"] | None = None,
        joint_vel: Float[Tensor, "envs joints"] | None = None,
    ) -> None:
        """Writes state in the worlds of the mask; what is not given stays. Velocities in the world frame.

        Raises:
            TaskError: The mask or a value has another shape, or the root of a fixed base is given.
        """
        ...


@runtime_checkable
class Sim(Protocol):
    """`num_envs` copies of one scene, stepped together."""

    name: str
    num_envs: int
    device: torch.device
    dt: float
    """Physics step [s]."""
    scene: Scene
    buffers: str
    """Sizes of buffers that can overflow, as settings: `sim.njmax=128 sim.nconmax=32`; empty where there are none."""

    @property
    def diverged(self) -> Bool[Tensor, " envs"]:
        """Worlds whose state became NaN, infinite or too large in the last `step`.

        `env/nan_guard.py` keeps the state before it; `run/finite_check.py` checks what the physics does not.
        """
        ...

    @property
    def bad_inputs(self) -> Bool[Tensor, " envs"]:
        """Worlds in which a control, or a force that is applied, is NaN or infinite now.

        Simulators treat such a control differently: one takes it for 0, another one diverges.
        """
        ...

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        """Worlds in which contacts or constraints were dropped, since their last reset, because a buffer was full."""
        ...

    def articulation(self, name: str) -> Articulation:
        """Returns the articulation that the scene knows under this name."""
        ...

    def param(self, name: str, articulation: str | None = None, elements: Sequence[str] | None = None) -> Param:
        """Returns a physical parameter of which every world has its own values from now on.

            self.mass = sim.param("body_mass", "ant", ["torso"])
            self.mass.set(self.mass.default * self.random.uniform(0.8, 1.2, 1), where)

        Call it in the task's `__init__`: a CUDA graph that was captured before would continue to use the shared values.

        Args:
            name: Name in MuJoCo's model: `body_mass`, `geom_friction`, ..., or `gravity`; see `params.FIELDS`.
            articulation: Articulation that has it; None for gravity. `ground` has the geoms that are fixed to the
                world.
            elements: Bodies (also of geoms), joints, actuators or tendons; None for all of them.

        Raises:
            TaskError: There is no such parameter or element.
        """
        ...

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> Rays:
        """Makes rays, such as those of a lidar; call it once, in the task's `__init__`.

        Args:
            num_rays: Rays in each world.
            ignore: Articulations that the rays pass through; the robot's own, mostly.

        Raises:
            TaskError: There is no such articulation.
        """
        ...

    def step(self, substeps: int) -> None:
        """Advances all worlds by `substeps` physics steps with the controls held."""
        ...

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Puts the worlds of the mask back to the scene's default state and clears the solver's caches."""
        ...

    def refresh(self) -> None:
        """Lets body poses and velocities follow the states written since the last call or step."""
        ...

    def scene_qpos(self) -> Float[Tensor, "envs nq"]:
        """Returns positions in the layout of the scene's MuJoCo model (`MjData.qpos`), for rendering."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the full state, so that a simulation loaded with it continues bit for bit where the backend can."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        ...

    def close(self) -> None:
        """Frees threads and memory."""
        ...
