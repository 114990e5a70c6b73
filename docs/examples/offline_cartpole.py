"""Isaac Lab's Cartpole without downloads: the robot comes from the newton package, and there is no ground.

Run in this folder: python train.py task=IsaacLab env.id=offline_cartpole:Offline-Cartpole env.physics=newton_mjwarp
"""

from pathlib import Path

import gymnasium
import newton.examples
from isaaclab.actuators import ImplicitActuatorCfg
from isaaclab.utils import configclass
from isaaclab_tasks.core.cartpole.cartpole_direct_env_cfg import CartpoleEnvCfg

ROBOT = Path(newton.examples.__file__).parent / "assets" / "cartpole.usda"


@configclass
class OfflineCartpoleCfg(CartpoleEnvCfg):
    """Settings of the envs."""

    cart_dof_name = "railCartJoint"
    pole_dof_name = "cartPoleJoint"

    def __post_init__(self) -> None:
        """Replace the assets that Isaac Lab loads."""
        super().__post_init__()
        self.scene.ground = None
        self.scene.clone_in_fabric = False
        robot = self.scene.cartpole
        robot.spawn.usd_path = str(ROBOT)
        robot.init_state.joint_pos = {".*": 0.0}
        motor = ImplicitActuatorCfg(joint_names_expr=[".*"], joint_effort_limit=400.0, stiffness=0.0, damping=0.0)
        robot.actuators = {"all": motor}


gymnasium.register(
    id="Offline-Cartpole",
    entry_point="isaaclab_tasks.core.cartpole.cartpole_direct_env:CartpoleEnv",
    disable_env_checker=True,
    kwargs={"env_cfg_entry_point": OfflineCartpoleCfg},
)
