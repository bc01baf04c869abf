"""What containers share: they hand carry, extras, metrics and losses to and from their children.

A container says in `route` how inputs and outputs travel. `route` runs unchanged on one step, [batch, ...], and on a
whole sequence, [time, batch, ...], so in the loss only those children scan that need to.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from nnx_ppo.networks import functional
from nnx_ppo.networks.types import ModuleState, SequenceModule, StatefulModule, StatefulModuleOutput

CallChild = Callable[[str | int, StatefulModule, ModuleState, Any, Any], StatefulModuleOutput]
"""(name, child, its carry, its input, its extras) -> its output."""


class Container(SequenceModule):
    """Base of the modules made of modules."""

    @abc.abstractmethod
    def route(self, state: Any, obs: Any, rollout_extras: Any, call: CallChild) -> StatefulModuleOutput:
        """Run the children through `call`; touch only trailing axes, for the leading ones may be one or two."""

    def __call__(self, state: ModuleState, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """One step of every child."""
        return self.route(state, obs, rollout_extras, naming_the_child)

    def over_time(
        self, state: ModuleState, obs: Any, rollout_extras: Any, done: Bool[Array, "time batch"]
    ) -> StatefulModuleOutput:
        """A sequence of steps of every child."""
        return self.route(state, obs, rollout_extras, self.calling_over_time(done))

    def calling_over_time(self, done: Bool[Array, "time batch"]) -> CallChild:
        """What `route` calls its children with when it is given a sequence."""

        def call(name: str | int, child: StatefulModule, state: Any, obs: Any, extras: Any) -> StatefulModuleOutput:
            return naming_the_child(name, lambda: functional.over_time(child, state, obs, extras, done))

        return call


class KeyedContainer(Container):
    """Children with names; carry and extras are dicts by name.

    Subclasses choose what each child sees (`select`) and what becomes of the outputs (`combine`).

    Args:
      modules: a dict from names to modules, for names that are not Python identifiers.
      **kwargs: or the modules by keyword.
    """

    def __init__(self, modules: Mapping[str, StatefulModule] | None = None, /, **kwargs: StatefulModule):
        kind = type(self).__name__
        if modules is not None and kwargs:
            raise ValueError(f"{kind} got both a dict and keywords ({', '.join(kwargs)}); give one of them.")
        components = kwargs if modules is None else modules
        if not isinstance(components, Mapping):
            raise TypeError(f"{kind} got a {type(components).__name__}; a dict from names to modules is accepted.")
        if not components:
            raise ValueError(f"{kind} got no modules; give it at least one.")
        check_modules(kind, components)
        if not all(isinstance(name, str) for name in components):
            raise TypeError(f"{kind} got the names {list(components)}; strings are accepted.")
        self.components = nnx.Dict(dict(components))
        # A split network comes back with its nnx.Dict sorted; the order that the user gave is kept here.
        self.names = tuple(components)

    def children_by_name(self) -> dict[str, StatefulModule]:
        """The children, in the order in which they run and their outputs are put together."""
        return {name: self.components[name] for name in self.names}

    def select(self, name: str, obs: Any) -> Any:
        """The input of a child: by default that of the container."""
        del name
        return obs

    @abc.abstractmethod
    def combine(self, outputs: dict[str, Any]) -> Any:
        """The output of the container."""

    def route(self, state: Any, obs: Any, rollout_extras: Any, call: CallChild) -> StatefulModuleOutput:
        """Each child by its name."""
        children = self.children_by_name()
        check_keys(type(self).__name__, state, children)
        replay = rollout_extras if rollout_extras is not None else dict.fromkeys(children)
        outs = {
            name: call(name, child, state[name], self.select(name, obs), replay[name])
            for name, child in children.items()
        }
        return StatefulModuleOutput(
            next_state={name: out.next_state for name, out in outs.items()},
            output=self.combine({name: out.output for name, out in outs.items()}),
            regularization_loss=sum((out.regularization_loss for out in outs.values()), jnp.zeros(())),
            metrics={name: out.metrics for name, out in outs.items()},
            rollout_extras={name: out.rollout_extras for name, out in outs.items()},
        )

    def initialize_state(self, batch_size: int) -> dict[str, ModuleState]:
        """One carry per child."""
        return {name: child.initialize_state(batch_size) for name, child in self.children_by_name().items()}

    def reset_state(self, prev_state: dict[str, ModuleState]) -> dict[str, ModuleState]:
        """Each child's own reset."""
        return {name: child.reset_state(prev_state[name]) for name, child in self.children_by_name().items()}

    def update_statistics(self, rollout_extras: Any) -> None:
        """Pass each child its own extras."""
        for name, child in self.children_by_name().items():
            child.update_statistics(rollout_extras[name])


class DispatchContainer(KeyedContainer):
    """A keyed container of which each child sees the entry of its own name in a dict input; others are dropped."""

    def select(self, name: str, obs: Any) -> Any:
        """The entry of this name.

        Raises:
          ValueError: the input is not a dict, or lacks the entry.
        """
        return entry_of(type(self).__name__, obs, name)


def entry_of(kind: str, obs: Any, key: Any) -> Any:
    """`obs[key]` of a dict, or a ValueError that says what there is."""
    if not isinstance(obs, Mapping):
        raise ValueError(f"{kind} takes a dict with the key {key!r} and got {shape_of(obs)}.")
    if key not in obs:
        raise ValueError(f"{kind} takes the key {key!r} of its input, which has {', '.join(map(repr, obs))}.")
    return obs[key]


def check_modules(kind: str, modules: Mapping[Any, Any]) -> None:
    """Refuse what is not a module."""
    for name, module in modules.items():
        if not isinstance(module, StatefulModule):
            raise TypeError(
                f"{kind} got {type(module).__name__} as {name!r}; StatefulModules are accepted. To put a function or "
                "an nnx module there, wrap it in a small StatefulModule (docs/networks.md shows one)."
            )


def check_keys(kind: str, state: Any, children: Mapping[str, StatefulModule]) -> None:
    """Refuse a carry that is not this container's."""
    if not isinstance(state, Mapping) or set(state) != set(children):
        given = f"keys {sorted(map(str, state))}" if isinstance(state, Mapping) else f"type {type(state).__name__}"
        raise ValueError(
            f"{kind} takes a carry with the keys {sorted(children)} and got one of {given}; "
            "pass what its initialize_state returned."
        )


def shape_of(obs: Any) -> str:
    """An input in a few words, for a message."""
    if isinstance(obs, Mapping):
        return "a dict with the keys " + ", ".join(map(repr, obs))
    shape = getattr(obs, "shape", None)
    return f"a {type(obs).__name__}" if shape is None else f"an array of shape {tuple(shape)}"


def naming_the_child(name: str | int, call: Callable[..., StatefulModuleOutput], *args: Any) -> StatefulModuleOutput:
    """`call(*args)`; an error names the child, and on its way out through the containers the path to it."""
    try:
        return call(*args)
    except (ValueError, TypeError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            path, message = getattr(error, "module_path", ()), getattr(error, "module_message", error.args[0])
            path = (name, *path)
            error.args = (f"in module {'/'.join(map(str, path))}: {message}",)
            error.module_path, error.module_message = path, message  # type: ignore[union-attr]
        raise
