"""Calling a split network as a pure function, which is how compiled code sees it."""

from typing import Any

import jax
from flax import nnx

from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput


def split(network: StatefulModule) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """(graphdef, params, variables): static structure, `nnx.Param`s, and everything else."""
    graphdef, params, variables = nnx.split(network, nnx.Param, ...)
    return graphdef, params, variables


def merge(graphdef: nnx.GraphDef, params: nnx.State, variables: nnx.State) -> Any:
    """The network again, with variables of its own: what a call does to them stays with this copy."""
    # Rebuilding the states makes the variables belong to the trace at hand, also inside cond, scan and grad.
    params, variables = jax.tree.map(lambda leaf: leaf, (params, variables))
    return nnx.merge(graphdef, params, variables)


def apply(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    variables: nnx.State,
    state: ModuleState,
    obs: Any,
    rollout_extras: Any = None,
) -> tuple[StatefulModuleOutput, nnx.State]:
    """Call the network; returns its output and the variables after the call (random streams have advanced)."""
    network = merge(graphdef, params, variables)
    out = network(state, obs, rollout_extras)
    return out, split(network)[2]


def is_stateless(state: ModuleState) -> bool:
    """Whether a carry is empty, so that steps do not depend on the steps before them."""
    return not jax.tree.leaves(state)


def training_graphdef(graphdef: nnx.GraphDef, params: nnx.State, variables: nnx.State) -> nnx.GraphDef:
    """The structure of the same network in training mode, in whichever it was left."""
    network = merge(graphdef, params, variables)
    network.train()
    return split(network)[0]


def evaluation_graphdef(graphdef: nnx.GraphDef, params: nnx.State, variables: nnx.State) -> nnx.GraphDef:
    """The structure of the same network in evaluation mode (deterministic samplers)."""
    network = merge(graphdef, params, variables)
    network.eval()
    return split(network)[0]
