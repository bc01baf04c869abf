"""ForwardModel: an auxiliary head that predicts the next observation or latent from features and action."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from nnx_ppo.networks import last_step
from nnx_ppo.networks.routing import CallChild, Container, check_keys, check_modules, shape_of
from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput

PARTS = ("policy", "predictor")


class ForwardModel(Container):
    """Wraps the action port: runs the policy, and learns to predict from its input and its action what comes next.

        PPOAdapter(
            action=ForwardModel(policy, make_mlp([obs_size + action_size, 64, obs_size], rngs), obs_size, action_size),
            value=critic,
        )

    The output is the policy's. The regularization loss gains `weight` times the squared error, mean over features, of
    what was predicted from the step before; metric `fm_pred_mse`, unweighted. At the first step of an episode it is 0.
    The target is held fixed, so a latent is not drawn to what is easy to predict; the features are not.

    Args:
      policy: a module that ends with a sampler, or with a tree of them.
      predictor: a module without a carry, [*batch, features + action] -> [*batch, target].
      features_size: size of the features.
      action_size: size of the encoded action.
      weight: weight of the loss.
      features: picks [*batch, features_size] from the input; None takes all of it.
      target: picks what is predicted, [*batch, n], from the input; None takes the features.
      encode_action: makes [*batch, action_size] of the policy's actions; None joins the heads' actions, by sorted key.
        Discrete actions need one, such as `lambda action: jax.nn.one_hot(action, 3)`.
    """

    def __init__(
        self,
        policy: StatefulModule,
        predictor: StatefulModule,
        features_size: int,
        action_size: int,
        weight: float = 1.0,
        features: Callable[[Any], jax.Array] | None = None,
        target: Callable[[Any], jax.Array] | None = None,
        encode_action: Callable[[Any], jax.Array] | None = None,
    ):
        check_modules("ForwardModel", {"policy": policy, "predictor": predictor})
        if jax.tree.leaves(jax.eval_shape(lambda: predictor.initialize_state(1))):
            raise ValueError("ForwardModel takes a predictor without a carry, such as make_mlp builds.")
        self.policy = policy
        self.predictor = predictor
        self.input_size = features_size + action_size
        self.weight = weight
        self.features = features or (lambda obs: obs)
        self.target = target or self.features
        self.encode_action = encode_action or join_actions

    def __call__(self, state: Any, obs: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """One step; the carry holds the predictor's input of the step before."""
        # Stands here because over_time does: functional.over_time trusts it where both come from the same class.
        return super().__call__(state, obs, rollout_extras)

    def route(self, state: Any, obs: Any, rollout_extras: Any, call: CallChild) -> StatefulModuleOutput:
        """One step, [batch, ...]."""
        remembered = lambda this: (state["before"]["last"], state["before"]["valid"])
        return self._run(state, obs, rollout_extras, call, remembered)

    def over_time(
        self, state: Any, obs: Any, rollout_extras: Any, done: Bool[Array, "time batch"]
    ) -> StatefulModuleOutput:
        """The same for a sequence; only what the policy has of recurrent layers is scanned."""
        shifted = lambda this: last_step.step_before(state["before"], this, done)
        return self._run(state, obs, rollout_extras, self.calling_over_time(done), shifted)

    def _run(
        self,
        state: Any,
        obs: Any,
        rollout_extras: Any,
        call: CallChild,
        before: Callable[[jax.Array], tuple[jax.Array, Bool[Array, "..."]]],
    ) -> StatefulModuleOutput:
        check_keys("ForwardModel", state, dict.fromkeys((*PARTS, "before")))  # type: ignore[arg-type]
        replay = rollout_extras if rollout_extras is not None else dict.fromkeys(PARTS)
        policy = call("policy", self.policy, state["policy"], obs, replay["policy"])
        action = self.encode_action(actions_of(policy.output))
        this = jnp.concatenate([self.features(obs), jax.lax.stop_gradient(action)], axis=-1)
        if this.shape[-1] != self.input_size:
            raise ValueError(
                f"ForwardModel was built for {self.input_size} features and actions and got {this.shape[-1]}: "
                f"features {shape_of(self.features(obs))}, action {shape_of(action)}."
            )
        last, valid = before(this)
        predictor = call("predictor", self.predictor, state["predictor"], last, replay["predictor"])
        target = jax.lax.stop_gradient(self.target(obs))
        if predictor.output.shape != target.shape:
            raise ValueError(
                f"ForwardModel's predictor gives {shape_of(predictor.output)} and its target is {shape_of(target)}."
            )
        mse = jnp.where(valid, jnp.mean((predictor.output - target) ** 2, axis=-1), 0.0)
        return StatefulModuleOutput(
            next_state={
                "policy": policy.next_state,
                "predictor": predictor.next_state,
                "before": last_step.remember(this, valid.shape[0]),
            },
            output=policy.output,
            regularization_loss=policy.regularization_loss + predictor.regularization_loss + self.weight * mse,
            metrics={"policy": policy.metrics, "predictor": predictor.metrics, "fm_pred_mse": mse},
            rollout_extras={"policy": policy.rollout_extras, "predictor": predictor.rollout_extras},
        )

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Nothing to compare with yet."""
        return {
            "policy": self.policy.initialize_state(batch_size),
            "predictor": self.predictor.initialize_state(batch_size),
            "before": last_step.nothing_yet(batch_size, jnp.zeros(self.input_size)),
        }

    def reset_state(self, prev_state: Any) -> ModuleState:
        """The policy's own reset, and nothing to compare with."""
        fresh = jax.tree.map(jnp.zeros_like, prev_state["before"])
        return {
            "policy": self.policy.reset_state(prev_state["policy"]),
            "predictor": prev_state["predictor"],
            "before": fresh,
        }

    def update_statistics(self, rollout_extras: Any) -> None:
        """Pass both parts their own extras."""
        self.policy.update_statistics(rollout_extras["policy"])
        self.predictor.update_statistics(rollout_extras["predictor"])


def actions_of(samples: Any) -> Any:
    """The actions in a tree of samplers' outputs."""
    is_sample = lambda node: isinstance(node, dict) and "action" in node and "log_likelihood" in node
    return jax.tree.map(lambda sample: sample["action"], samples, is_leaf=is_sample)


def join_actions(actions: Any) -> jax.Array:
    """The actions of all heads in one array, [*batch, n]."""
    leaves = jax.tree.leaves(actions)
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise TypeError("ForwardModel cannot join discrete actions; give it encode_action, such as a one-hot encoding.")
    return jnp.concatenate(leaves, axis=-1)
