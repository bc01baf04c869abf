"""Calling a split network as a pure function, which is how compiled code sees it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from nnx_ppo.networks.types import ModuleState, SequenceModule, StatefulModule, StatefulModuleOutput


def build(make: Callable[[], StatefulModule]) -> StatefulModule:
    """`make()`, its initial values worked out by one program instead of one for each parameter's shape.

    The program runs once, so a CPU does not optimise it, which takes longer than running it.
    """
    graphdefs = []

    def initial_values() -> nnx.State:
        graphdef, state = nnx.split(make())
        graphdefs.append(graphdef)
        return state

    state = compile_quickly(jax.jit(initial_values).lower())()
    return nnx.merge(graphdefs[0], state)


def compile_quickly(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program that runs once or hardly computes; a CPU's optimising would take longer than it saves."""
    options: Any = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return lowered.compile(compiler_options=options)


def split(network: StatefulModule) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """(graphdef, params, variables): static structure, `nnx.Param`s, and everything else."""
    graphdef, params, variables = nnx.split(network, nnx.Param, ...)
    # nnx.split hands out the network's own variables: an update of the network would change what was split off.
    params, variables = jax.tree.map(lambda leaf: leaf, (params, variables))
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


# --- sequences ------------------------------------------------------------------------------------------------


def output_shapes(*args: Any) -> StatefulModuleOutput:
    """The shapes of `apply(*args)[0]`; computes nothing."""
    graphdef, *arrays = args
    return jax.eval_shape(lambda *arrays: apply(graphdef, *arrays)[0], *arrays)


def over_time(
    module: StatefulModule, state: ModuleState, obs: Any, rollout_extras: Any, done: Bool[Array, "time batch"]
) -> StatefulModuleOutput:
    """Replay a sequence, as fast as the module allows; arguments and result as in `SequenceModule.over_time`.

    Steps of a module without a carry do not depend on each other: they are one large batch. Containers hand the
    sequence on to their children. What is left, the recurrent layers, is scanned. Random streams of `module` advance.
    """
    if is_stateless(state):
        return _as_one_batch(module, state, obs, rollout_extras, done)
    if _takes_sequences(module):
        return module.over_time(state, obs, rollout_extras, done)  # type: ignore[attr-defined]
    return _scanned(module, state, obs, rollout_extras, done)


def _takes_sequences(module: StatefulModule) -> bool:
    # A subclass that overrides __call__ alone, say of Sequential, means it: its over_time would skip the change.
    defined_at = lambda name: next(i for i, kind in enumerate(type(module).__mro__) if name in vars(kind))
    return isinstance(module, SequenceModule) and defined_at("over_time") <= defined_at("__call__")


def _as_one_batch(module: Any, state: ModuleState, obs: Any, rollout_extras: Any, done: Any) -> StatefulModuleOutput:
    # Environments first: where they are spread over devices, so is the large batch then.
    merge_axes = lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
    split_axes = lambda x: x.reshape(*done.shape[::-1], *x.shape[1:]).swapaxes(0, 1)
    out = module(state, jax.tree.map(merge_axes, obs), jax.tree.map(merge_axes, rollout_extras))
    loss = out.regularization_loss
    return StatefulModuleOutput(
        state, jax.tree.map(split_axes, out.output), split_axes(loss) if jnp.ndim(loss) else loss, {}
    )


def _scanned(module: Any, state: ModuleState, obs: Any, rollout_extras: Any, done: Any) -> StatefulModuleOutput:
    graphdef, params, variables = split(module)

    def one_step(carry: Any, inputs: Any) -> tuple[Any, Any]:
        variables, state = carry
        obs, extras, done = inputs
        out, variables = apply(graphdef, params, variables, state, obs, extras)
        state = reset_carry(graphdef, params, variables, out.next_state, done)
        # A loss may be one number for the whole batch.
        return (variables, state), (out.output, jnp.broadcast_to(out.regularization_loss, done.shape))

    (variables, state), (output, loss) = jax.lax.scan(one_step, (variables, state), (obs, rollout_extras, done))
    nnx.update(module, variables)
    return StatefulModuleOutput(state, output, loss, {})


def reset_carry(
    graphdef: nnx.GraphDef, params: nnx.State, variables: nnx.State, carry: ModuleState, done: Bool[Array, " batch"]
) -> ModuleState:
    """Start the network's carry afresh where an episode ended."""
    if is_stateless(carry):
        return carry
    return tree_where(done, merge(graphdef, params, variables).reset_state(carry), carry)


def tree_where(condition: Bool[Array, " batch"], if_true: Any, if_false: Any) -> Any:
    """`jnp.where` on every leaf, with the condition along the leading axis."""

    def where(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(where, if_true, if_false)
