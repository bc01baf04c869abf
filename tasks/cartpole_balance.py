"""cartpole_balance: keep the pole upright near the centre."""

from typing import TYPE_CHECKING, Any

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig, VideoConfig
from tasks.task import Task

if TYPE_CHECKING:
    from flax import nnx

    from nnx_ppo.networks.types import StatefulModule

EPISODE_LENGTH = 1000  # 10 s


def make_env(physics: str | None = None) -> Any:
    """dm_control's cartpole with its time limit."""
    from envs.cartpole import CartpoleBalance
    from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

    return EpisodeWrapper(CartpoleBalance(physics=physics), EPISODE_LENGTH)


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
    name="cartpole_balance",
    summary="A cart keeps a pole upright that starts almost so (dm_control's task)",
    make_env=make_env,
    make_networks=make_networks,
    config=TrainConfig(
        ppo=PPOConfig(
            n_envs=256,
            rollout_length=32,
            total_steps=3_000_000,
            n_epochs=4,
            n_minibatches=8,
            discounting_factor=0.99,
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            gradient_clipping=1.0,
        ),
        eval=EvalConfig(every_steps=250_000, n_envs=32, max_episode_length=EPISODE_LENGTH),
        video=VideoConfig(enabled=True, every_steps=1_500_000, episode_length=EPISODE_LENGTH),
        checkpoint_every_steps=1_000_000,
    ),
)
