"""One run in two processes, each with a device of its own, on this machine."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from test_devices import CONFIG, mlp

from envs.cartpole import CartpoleSwingup
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

PROGRAM = """
    import dataclasses, sys
    import jax
    process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    import numpy as np
    from test_devices import CONFIG, mlp
    from test_distributed import make_env
    from envs import host_call
    from nnx_ppo.algorithms.checkpointing import checkpoints, load_checkpoint, make_checkpoint_fn
    from nnx_ppo.algorithms.optimizer import new_optimizer_state
    from nnx_ppo.algorithms.ppo import train_ppo
    from nnx_ppo.networks import functional

    assert host_call.available()
    logged = []
    env = make_env()
    config = dataclasses.replace(CONFIG, checkpoint_every_steps=40)
    network = mlp(env)
    result = train_ppo(
        env, network, config, devices=jax.devices(), checkpoint_fn=make_checkpoint_fn(folder, config, keep=None),
        log_fn=lambda metrics, steps: logged.append(metrics["eval/episode_reward/mean"]),
        # Only the second process wants to stop.
        stop_fn=lambda steps: process == 1 and steps >= 80,
    )
    own = result.training_state.env_states.obs.addressable_shards[0].data
    saved = len(checkpoints(folder)) if process == 0 else 0
    print(result.total_steps, len(logged), saved, *own.shape)
    params = [np.asarray(leaf) for leaf in jax.tree.leaves(functional.split(network)[1])]

    # From the checkpoint before, to the same end.
    empty = new_optimizer_state(config.ppo, functional.split(network)[1])
    state = load_checkpoint(f"{folder}/step_0000000040", network, empty)["training_state"]
    again = train_ppo(env, network, config, total_steps=80, devices=jax.devices(), initial_state=state)
    for one, other in zip(params, jax.tree.leaves(again.training_state.params)):
        np.testing.assert_array_equal(one, other)

    # And one by itself in each process, which neither waits for the other nor leaves the telling to it.
    told = []
    log_fn = lambda metrics, steps: told.append(steps)
    train_ppo(env, mlp(env), config, total_steps=40 * (1 + process), log_fn=log_fn, checkpoint_fn=lambda *_: None)
    assert told == [0, 40, 80][: 2 + process]
    np.savez(f"{folder}/{process}.npz", *params)
"""


def make_env():
    return EpisodeWrapper(CartpoleSwingup(physics="native"), 7)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = os.environ["XLA_FLAGS"].replace("device_count=2", "device_count=1")
    paths = os.pathsep.join(str(path) for path in (Path(__file__).parent, Path(__file__).parents[1]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(number), port, str(folder)],
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        found = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, errors[-3000:]
    said = [[int(word) for word in out.strip().splitlines()[-1].split()] for out, _ in found]
    params = [list(np.load(folder / f"{number}.npz").values()) for number in range(2)]
    return said, params


def test_two_processes_train_to_the_numbers_of_one(two_processes):
    _, params = two_processes
    env = make_env()
    state = train_ppo(env, mlp(env), CONFIG, devices=jax.devices(), total_steps=80).training_state
    for ours, theirs, alone in zip(*params, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, alone, atol=1e-3)


def test_the_first_process_tells_and_saves_whole_states_and_a_stop_of_any_ends_both(two_processes):
    said, _ = two_processes
    first, second = said
    assert first == [80, 3, 3, 4, 5]
    assert second == [80, 0, 0, 4, 5]
