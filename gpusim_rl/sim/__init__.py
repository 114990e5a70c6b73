"""Physics: `num_envs` copies of one `Scene`, stepped together."""

from gpusim_rl.sim.articulation import Articulation
from gpusim_rl.sim.bodies import Bodies, Contacts, Sensor, Sites
from gpusim_rl.sim.camera import CameraImages
from gpusim_rl.sim.dynamics import Dynamics
from gpusim_rl.sim.interface import Sim, SimChoice, choose_sim, make_sim, put_pose
from gpusim_rl.sim.params import Param
from gpusim_rl.sim.rays import Rays
from gpusim_rl.sim.scene import Scene

__all__ = [
    "Articulation",
    "Bodies",
    "CameraImages",
    "Contacts",
    "Dynamics",
    "Param",
    "Rays",
    "Scene",
    "Sensor",
    "Sim",
    "SimChoice",
    "Sites",
    "choose_sim",
    "make_sim",
    "put_pose",
]
