"""cartpole_balance: keep the pole upright near the centre. All but the start is as in the swing-up."""

import dataclasses
from typing import Any

from tasks import cartpole_swingup
from tasks.cartpole_swingup import EPISODE_LENGTH, make_networks
from tasks.task import Task


def make_env(physics: str | None = None) -> Any:
    """dm_control's cartpole with its time limit."""
    from envs.cartpole import CartpoleBalance
    from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

    return EpisodeWrapper(CartpoleBalance(physics=physics), EPISODE_LENGTH)


SWINGUP = cartpole_swingup.TASK.config

TASK = Task(
    name="cartpole_balance",
    summary="A cart keeps a pole upright that starts almost so (dm_control's task)",
    make_env=make_env,
    make_networks=make_networks,
    config=dataclasses.replace(
        SWINGUP,
        ppo=dataclasses.replace(SWINGUP.ppo, total_steps=3_000_000),
        eval=dataclasses.replace(SWINGUP.eval, every_steps=250_000),
        video=dataclasses.replace(SWINGUP.video, every_steps=1_500_000),
    ),
)
