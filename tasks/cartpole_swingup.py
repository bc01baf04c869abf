"""cartpole_swingup: swing the pole up and hold it upright near the centre."""

from typing import TYPE_CHECKING, Any

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig, VideoConfig
from tasks.task import Evidence, Task

if TYPE_CHECKING:
    from flax import nnx

    from nnx_ppo.networks.types import StatefulModule

EPISODE_LENGTH = 1000  # 10 s


def make_env(physics: str | None = None) -> Any:
    """dm_control's cartpole with its time limit."""
    from envs.cartpole import CartpoleSwingup
    from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

    return EpisodeWrapper(CartpoleSwingup(physics=physics), EPISODE_LENGTH)


def make_networks(env: Any, rngs: "nnx.Rngs") -> "StatefulModule":
    """A small actor and a small critic."""
    from nnx_ppo.networks.factories import make_mlp_actor_critic

    return make_mlp_actor_critic(
        env.observation_size,
        env.action_size,
        actor_hidden_sizes=[64, 64],
        critic_hidden_sizes=[64, 64],
        rngs=rngs,
        activation="swish",
        normalize_obs=True,
    )


TASK = Task(
    name="cartpole_swingup",
    summary="A cart swings a pole up and holds it there (dm_control's task)",
    make_env=make_env,
    make_networks=make_networks,
    config=TrainConfig(
        ppo=PPOConfig(
            n_envs=256,
            rollout_length=32,
            total_steps=4_000_000,
            n_epochs=4,
            n_minibatches=8,
            discounting_factor=0.99,
            learning_rate=1e-3,
            learning_rate_schedule="linear",  # Without it the return falls back now and then.
            gradient_clipping=1.0,
        ),
        eval=EvalConfig(every_steps=500_000, n_envs=32, max_episode_length=EPISODE_LENGTH),
        video=VideoConfig(enabled=True, every_steps=2_000_000, episode_length=EPISODE_LENGTH),
        checkpoint_every_steps=1_000_000,
    ),
    evidence=Evidence(
        scores=(833.9, 857.2, 846.2),
        seeds=(0, 1, 2),
        steps=4_005_888,
        minutes=3.8,
        device="2 cores of an Intel Xeon, native physics",
        date="2026-11-29",
        versions={"python": "3.11", "jax": "0.10.2", "flax": "0.12.8", "mujoco": "4.0.0", "code": "22e2f42"},
        command="uv run scripts/train.py --task cartpole_swingup --seed 0",
    ),
)
