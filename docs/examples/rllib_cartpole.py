"""Train our Cartpole, as a Gymnasium vector env, with RLlib's PPO.

pip install "ray[rllib]" -e ".[gymnasium]" && python docs/examples/rllib_cartpole.py
"""

import time

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

NUM_ENVS, HORIZON = 64, 64

config = (
    PPOConfig()
    .environment("gpusim_rl.connect.gymnasium_out:gpusim_rl/Cartpole-v0", env_config={"device": "cpu"})
    # Step envs in this process; num_env_runners=2 would start two more, each with 64 envs.
    .env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS, gym_env_vectorize_mode="vector_entry_point")
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32, 32], vf_share_layers=False))
    .training(train_batch_size_per_learner=NUM_ENVS * HORIZON, minibatch_size=512, num_epochs=8)
    .training(lr=1e-3, lambda_=0.95, vf_clip_param=1e4)
    .debugging(seed=42)
)
algorithm = config.build_algo()
start_s = time.perf_counter()
for iteration in range(1, 31):
    episodes = algorithm.train()["env_runners"]
    if iteration == 1 or iteration % 10 == 0:
        mean = episodes["episode_return_mean"]
        print(f"iteration {iteration}: return {mean:.0f}, {time.perf_counter() - start_s:.0f} s", flush=True)
algorithm.stop()
