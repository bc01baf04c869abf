"""humanoid: run forward without falling, as fast as possible."""

from typing import TYPE_CHECKING, Any

from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig, VideoConfig
from tasks.task import Evidence, Task

if TYPE_CHECKING:
    from flax import nnx

    from nnx_ppo.networks.types import StatefulModule

EPISODE_LENGTH = 1000  # 15 s


def make_env(physics: str | None = None) -> Any:
    """Brax's humanoid with its time limit."""
    from envs.humanoid import Humanoid
    from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

    return EpisodeWrapper(Humanoid(physics=physics), EPISODE_LENGTH)


def make_networks(env: Any, rngs: "nnx.Rngs") -> "StatefulModule":
    """A small actor and a larger critic."""
    from nnx_ppo.networks.factories import make_mlp_actor_critic

    return make_mlp_actor_critic(
        env.observation_size,
        env.action_size,
        actor_hidden_sizes=[64, 64, 64],
        critic_hidden_sizes=[256, 256],
        rngs=rngs,
        activation="swish",
        normalize_obs=True,
        entropy_weight=2e-3,
    )


TASK = Task(
    name="humanoid",
    summary="A humanoid with 17 motors runs forward without falling (Brax's task)",
    make_env=make_env,
    make_networks=make_networks,
    config=TrainConfig(
        ppo=PPOConfig(
            n_envs=512,
            rollout_length=20,
            total_steps=10_000_000,
            n_epochs=4,
            n_minibatches=8,
            discounting_factor=0.98,
            clip_range=0.3,
            learning_rate=6e-4,
            learning_rate_schedule="linear",  # At a constant rate the gait is lost again after some millions of steps.
            gradient_clipping=1.0,
            reward_scaling=0.1,
        ),
        eval=EvalConfig(every_steps=1_000_000, n_envs=64, max_episode_length=EPISODE_LENGTH),
        video=VideoConfig(enabled=True, every_steps=5_000_000, episode_length=EPISODE_LENGTH),
        checkpoint_every_steps=1_000_000,
    ),
    evidence=Evidence(
        scores=(10131.2, 9418.9, 10265.1),
        seeds=(0, 1, 2),
        steps=10_004_480,
        minutes=28.1,
        device="2 cores of an AMD EPYC beside other work, native physics",
        date="2026-12-01",
        versions={"python": "3.11", "jax": "0.10.2", "flax": "0.12.8", "mujoco": "4.0.0", "code": "6aaed2f"},
        command="uv run scripts/train.py --task humanoid --seed 0",
    ),
)
