"""FrankaReachCamera: FrankaReach with camera images of the target."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpusim_rl.env import Terms
from gpusim_rl.sim import Scene, Sim

from .franka_reach import FrankaReach, FrankaReachConfig

CAMERA, LOOKS_AT = (1.0, 0.38, 0.42), (0.525, 0.0, 0.285)  # m
FOVY = 66.0  # degrees; all targets are in the image


@dataclass(frozen=True, slots=True, kw_only=True)
class FrankaReachCameraConfig(FrankaReachConfig):
    """Settings of FrankaReachCamera; values are in cfg/task/FrankaReachCamera.yaml."""

    height: int
    width: int


class FrankaReachCamera(FrankaReach):
    """FrankaReachCamera: move the point between the fingertips to a red ball seen by a camera.

    The task is FrankaReach. The camera is in front of the robot, near the targets and to their left: the arm rarely
    hides the ball, and the ball's size in the image shows its distance.

    Action space: 7 numbers in [-1, 1], as in FrankaReach.

    Observation space: the policy gets RGB images (`camera`) and the arm's proprioception:
    | num   | name      | observation                              | unit  |
    |-------|-----------|------------------------------------------|-------|
    | 0-6   | joint_pos | joint positions of the arm from the pose | rad   |
    | 7-13  | joint_vel | joint velocities of the arm              | rad/s |
    | 14-20 | actions   | last action                              | -     |

    The critic also gets the target:
    | num   | name      | observation                              | unit  |
    |-------|-----------|------------------------------------------|-------|
    | 0-6   | joint_pos | joint positions of the arm from the pose | rad   |
    | 7-13  | joint_vel | joint velocities of the arm              | rad/s |
    | 14-16 | target    | position of the target                   | m     |
    | 17-23 | actions   | last action                              | -     |

    The `teacher` group is the observation of a trained FrankaReach policy:
    | num  | name   | observation | unit     |
    |------|--------|-------------|----------|
    | 0-23 | critic | the above   | as above |

    Reward terms: as in FrankaReach. Start: as in FrankaReach. Termination: none.
    """

    Config = FrankaReachCameraConfig
    cfg: FrankaReachCameraConfig

    @classmethod
    def scene(cls, cfg: FrankaReachConfig) -> Scene:
        assert isinstance(cfg, FrankaReachCameraConfig)
        scene = super().scene(cfg)
        scene.add_camera("camera", pos=CAMERA, target=LOOKS_AT, fovy=FOVY, size=(cfg.height, cfg.width))
        return scene

    def __init__(self, cfg: FrankaReachCameraConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.camera = sim.camera("camera")

    def observe(self) -> dict[str, Tensor | Terms]:
        state = self._state()
        own = {name: term for name, term in state.items() if name != "target"}
        return {"policy": own, "camera": self.camera.rgb, "critic": state, "teacher": state}
