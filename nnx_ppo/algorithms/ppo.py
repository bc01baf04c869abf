"""Proximal policy optimisation (Schulman et al. 2017). Start reading here.

`train_ppo` trains a network in an environment. Its heart is `ppo_step`, one iteration as a pure function:

    collect a rollout -> estimate advantages -> several epochs of clipped updates -> update statistics

`ppo_step` is compiled once per run; its input state is donated. It may be vmapped over seeds or sharded over
environments. The loop around it, which decides when to evaluate, record, save and log, is in `loop.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from nnx_ppo.algorithms import rollout
from nnx_ppo.algorithms.checkpointing import SavedLeaves, place
from nnx_ppo.algorithms.compilation import on_a_thread
from nnx_ppo.algorithms.config import LoggingLevel, PPOConfig, TrainConfig
from nnx_ppo.algorithms.devices import (
    ENVS,
    cores_for,
    mean_of_shares,
    place_network,
    place_state,
    replicate,
    spread,
    spread_state,
    use_devices,
)
from nnx_ppo.algorithms.jaxprs import keeps_one_core_busy
from nnx_ppo.algorithms.keys import Stream, numbered_keys, run_key, stream_key
from nnx_ppo.algorithms.loop import Programs, run_training
from nnx_ppo.algorithms.metrics import depends_on_input, grad_norms, iteration_metrics, metrics_of_level
from nnx_ppo.algorithms.optimizer import (
    adapt_learning_rate,
    as_matrix,
    make_optimizer,
    new_optimizer_state,
    schedule_learning_rate,
    scheduled_share,
    state_as_matrices,
    state_as_vectors,
)
from nnx_ppo.algorithms.returns import gae
from nnx_ppo.algorithms.tree_paths import flatten
from nnx_ppo.algorithms.types import (
    LogFn,
    NonFiniteEpisode,
    Replaceable,
    RLEnv,
    StopFn,
    TrainingState,
    TrainResult,
    Transition,
    VideoData,
    add_steps,
)
from nnx_ppo.networks import functional
from nnx_ppo.networks.shares import own_share
from nnx_ppo.networks.types import ModuleState, StatefulModule


def train_ppo(
    env: RLEnv,
    networks: StatefulModule,
    config: TrainConfig | None = None,
    *,
    total_steps: int | None = None,
    seed: int | None = None,
    log_fn: LogFn | None = None,
    video_fn: Callable[[VideoData], object] | None = None,
    checkpoint_fn: Callable[[TrainingState, int], object] | None = None,
    eval_env: RLEnv | None = None,
    initial_state: TrainingState | None = None,
    stop_fn: StopFn | None = None,
    nonfinite_fn: Callable[[NonFiniteEpisode], object] | None = None,
    devices: Sequence[Any] | None = None,
) -> TrainResult:
    """Train `networks` in `env`; afterwards (also after an exception) `networks` holds what was learned.

    Args:
      env: the environment; wrap it in `EpisodeWrapper` for a time limit.
      networks: an actor-critic, such as `make_mlp_actor_critic` builds.
      config: the configuration; None takes every default.
      total_steps: instead of `config.ppo.total_steps`.
      seed: instead of `config.seed`.
      log_fn: called once per iteration with a flat dict of metrics and the environment steps so far, and once
        before the first iteration if there was an evaluation or a video.
      video_fn: called, on a thread of its own, with the frames of an evaluation episode.
      checkpoint_fn: called with the training state and the environment steps.
      eval_env: the environment for evaluation and video; None takes `env`.
      initial_state: go on from this state, such as a checkpoint holds. It stays valid.
      stop_fn: asked after each iteration, and after its log_fn, with the environment steps; True ends the run
        normally. If it has an attribute `reads_metrics` that is False it is asked before log_fn instead, and the
        device need not wait for the host between iterations.
      nonfinite_fn: called after an iteration in which an environment went non-finite, with its last states and
        actions, if the environment has `replay_record` (`MjxEnv` does). Keeps that record of every step of a rollout.
      devices: spread the environments over these, such as `jax.devices()`; None takes what `default_devices` says. If
        they belong to several processes (`jax.distributed`), every process makes the same call; callbacks have to be
        given in all of them and are called in the first one, except for `stop_fn`: a yes of any of them ends the run.

    Returns:
      The final state, the metrics of the last iteration and the history of evaluations.

    Raises:
      ValueError: the network does not fit the environment's observation, or `n_envs` the number of devices.
      TypeError: the environment's step changes the shape or type of its state.
      NonFiniteError: too many updates in a row had a non-finite gradient.
    """
    config = config or TrainConfig()
    if total_steps is not None:
        config = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, total_steps=total_steps))
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    if devices is None:
        devices = default_devices(env, networks, config.ppo)
    with use_devices(devices, config.ppo):
        if initial_state is None:
            program, inputs = lower_initial_state(env, networks, config)
            compiled = on_a_thread(functional.compile_quickly, program)
            state, first_state = place_state(program.out_info), lambda: compiled.result()(*inputs)
        else:
            state, first_state = place_state(with_env_states(env, initial_state, config.ppo)), None
        keep_replay = nonfinite_fn is not None and has_replay_record(env, state.env_states)
        return run_training(
            Programs(
                train=functools.partial(ppo_step, env, config.ppo, keep_replay=keep_replay),
                eval_env=eval_env if eval_env is not None else env,
                steps_per_iteration=config.ppo.n_envs * config.ppo.rollout_length,
                total_steps=config.ppo.total_steps,
                max_skipped_updates=config.ppo.max_skipped_updates,
                nonfinite_names=NONFINITE_NAMES,
            ),
            config,
            state,
            networks,
            resumed=initial_state is not None and initial_state.steps_taken > 0,
            log_fn=log_fn,
            video_fn=video_fn,
            checkpoint_fn=checkpoint_fn,
            stop_fn=stop_fn,
            first_state=first_state,
            nonfinite_fn=nonfinite_fn,
        )


def default_devices(env: RLEnv, networks: StatefulModule, config: PPOConfig) -> list[Any] | None:
    """A CPU's cores, if XLA would step the environments on one of them, as it does MJX.

    None is JAX's default device.
    """
    cores = cores_for(config.n_envs)
    if not cores:
        return None
    graphdef, params, variables = functional.split(networks)

    def first_step(params: nnx.State, variables: nnx.State) -> Any:
        env_states = rollout.reset(env, run_key(0), config.n_envs)
        carry = functional.merge(graphdef, params, variables).initialize_state(config.n_envs)
        out, _ = functional.apply(graphdef, params, variables, carry, env_states.obs)
        return rollout.step(env, env_states, out.output.actions)

    # Traced as it will be for training, so that this trace of the environment serves there too.
    with use_devices(cores, config):
        return cores if keeps_one_core_busy(first_step, params, variables) else None


def default_config() -> TrainConfig:
    """A configuration with every default."""
    return TrainConfig()


# --- one iteration --------------------------------------------------------------------------------------------


def ppo_step(
    env: RLEnv, config: PPOConfig, state: TrainingState, keep_replay: bool = False
) -> tuple[TrainingState, dict[str, Any]]:
    """One iteration; pure. `env`, `config` and `keep_replay` are static, the metrics a flat dict of scalars.

    With `keep_replay` the metrics also have `replay`: the last steps of an environment that went non-finite.
    """
    start = state
    state, transitions = rollout.unroll(env, config, state, keep_replay)
    advantages, targets = estimate_advantages(config, state, transitions)
    state, update_metrics = update(config, state, start.network_states, transitions, advantages, targets)
    state = update_statistics(config, state, transitions)
    state = state.replace(
        iteration=state.iteration + 1,
        steps=add_steps(state.steps, config.n_envs * config.rollout_length),
        nonfinite_steps=state.nonfinite_steps + jnp.sum(transitions.nonfinite, dtype=jnp.uint32),
    )
    nonfinite = state.nonfinite_steps - start.nonfinite_steps
    metrics: dict[str, Any] = iteration_metrics(
        config, transitions, advantages, targets, update_metrics, state.params, nonfinite
    )
    return state, metrics | ({"replay": rollout.first_nonfinite(transitions)} if keep_replay else {})


def estimate_advantages(config: PPOConfig, state: TrainingState, transitions: Transition) -> tuple[Any, Any]:
    """Advantages and value targets per reward term, [time, batch]; once per iteration.

    `state` is the one after the rollout: its observation is where the last step led to.
    """
    out, _ = functional.apply(state.graphdef, state.params, state.variables, state.network_states, state.env_states.obs)
    values = transitions.network_output.value_estimates
    check_same_terms(transitions.rewards, values)

    def advantages_of(reward: Any, value: Any, last_value: Any, final_value: Any) -> Float[Array, "time batch"]:
        return gae(
            config.reward_scaling * reward,
            value,
            last_value,
            transitions.done,
            transitions.truncated,
            final_value,
            config.discounting_factor,
            config.gae_lambda,
        )

    advantages = jax.tree.map(
        advantages_of, transitions.rewards, values, out.output.value_estimates, transitions.final_values
    )
    return advantages, jax.tree.map(jnp.add, advantages, values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Minibatch(Replaceable):
    """What the loss reads; leaves [time, batch, ...], except for the carry, [batch, ...]."""

    obs: Any
    rollout_extras: Any
    old_loglikelihoods: Any
    advantages: Any
    targets: Any
    done: Bool[Array, "time batch"]
    network_states: ModuleState
    """The carry at the first step."""

    def take(self, rows: jax.Array) -> "Minibatch":
        """The sequences of some environments, shared out among the devices; the advantages are whole everywhere."""
        carry = jax.tree.map(lambda x: x[rows], self.network_states)
        sequences = jax.tree.map(lambda x: x[:, rows], self.replace(network_states=(), advantages=()))
        # Each device normalises all of them rather than wait for the others' sums.
        everywhere = replicate(rows)
        advantages = replicate(jax.tree.map(lambda x: x[:, everywhere], self.advantages))
        return spread(sequences, axis=1).replace(advantages=advantages, network_states=spread(carry))

    def shares(self) -> "Minibatch":
        """Along which axes devices share out a minibatch that was taken."""
        sequences = PartitionSpec(None, ENVS)
        return Minibatch(
            obs=sequences,
            rollout_extras=sequences,
            old_loglikelihoods=sequences,
            advantages=PartitionSpec(),
            targets=sequences,
            done=sequences,  # type: ignore[arg-type]
            network_states=PartitionSpec(ENVS),
        )


def update(
    config: PPOConfig,
    state: TrainingState,
    network_states: ModuleState,
    transitions: Transition,
    advantages: Any,
    targets: Any,
) -> tuple[TrainingState, dict[str, Array]]:
    """`n_epochs` passes over the batch, each in `n_minibatches` gradient steps; returns the mean of their metrics."""
    batch = Minibatch(
        obs=transitions.obs,
        rollout_extras=transitions.rollout_extras,
        old_loglikelihoods=transitions.network_output.loglikelihoods,
        advantages=advantages,
        targets=targets,
        done=transitions.done,
        network_states=network_states,
    )
    # Each minibatch takes its environments from everywhere.
    batch = replicate(batch)
    optimizer = make_optimizer(config)
    key = stream_key(state.rng_key, Stream.SHUFFLE, state.iteration)
    # Sorting random words shuffles; jax.random.permutation sorts several times and takes longer to compile.
    permutations = jnp.argsort(jax.random.bits(key, (config.n_epochs, config.n_envs)), axis=1)
    rows = permutations.reshape(config.n_epochs * config.n_minibatches, -1)

    start, unravel = as_matrix(state.params)

    def gradient_of(minibatch: Minibatch, params: jax.Array, variables: nnx.State) -> tuple[Any, nnx.State]:
        loss = lambda params: ppo_loss(config, unravel(params), state.graphdef, variables, minibatch)
        gradient, (metrics, after) = jax.grad(loss, has_aux=True)(params)
        # What a module keeps of the rows it saw, such as their mean, is averaged over the devices too.
        kept = lambda new, old: new if new is not old and jnp.issubdtype(new.dtype, jnp.floating) else None
        return (gradient, metrics, jax.tree.map(kept, after, variables)), after

    def one_update(carry: Any, rows: jax.Array) -> tuple[Any, Any]:
        params, optimizer_state, variables, skipped, source = carry
        minibatch = batch.take(rows)
        (gradient, metrics, kept), variables = mean_of_shares(
            gradient_of, minibatch, minibatch.shares(), rows.size, params, variables
        )
        variables = jax.tree.map(
            lambda mean, here: here if mean is None else mean, kept, variables, is_leaf=lambda x: x is None
        )
        if LoggingLevel.GRAD_NORM in config.logging_level:
            metrics |= grad_norms(unravel(gradient))
        changes, next_optimizer_state = optimizer.update(gradient, optimizer_state, params)
        finite = jnp.stack([jnp.isfinite(metrics[name]) for name in LOSSES] + [jnp.all(jnp.isfinite(gradient))])
        ok = jnp.all(finite)
        params, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(ok, new, old),
            (params + changes, next_optimizer_state),
            (params, optimizer_state),
        )
        skipped, source = jnp.where(ok, 0, skipped + 1), jnp.where(ok, source, jnp.argmin(finite))
        # A skipped update shows: it makes the iteration's means NaN, also those that were finite themselves.
        kl = metrics["losses/approx_kl"]
        metrics = {name: jnp.where(ok, value, jnp.nan) for name, value in wanted(metrics).items()}
        return (params, optimizer_state, variables, skipped, source), (metrics, kl)

    def wanted(metrics: dict[str, Array]) -> dict[str, Array]:
        metrics = metrics_of_level(config.logging_level, metrics)
        return {name: value for name, value in metrics.items() if name != "losses/regularization" or regularized}

    regularized = depends_on_input(
        lambda params, batch: (
            functional.apply(
                state.graphdef,
                params,
                state.variables,
                batch.network_states,
                *jax.tree.map(lambda x: x[0], (batch.obs, batch.rollout_extras)),
            )[0].regularization_loss
        ),
        state.params,
        batch,
    )
    optimizer_state = schedule_learning_rate(config, state.optimizer, state.iteration)
    carry = (start, state_as_matrices(optimizer_state), state.variables, state.skipped_updates, state.nonfinite_source)
    (params, optimizer_state, variables, skipped, source), (metrics, kls) = jax.lax.scan(one_update, carry, rows)
    optimizer_state = state_as_vectors(optimizer_state, state.params)
    optimizer_state = adapt_learning_rate(config, optimizer_state, jnp.mean(kls[-config.n_minibatches :]))
    state = state.replace(
        params=unravel(params),
        optimizer=optimizer_state,
        variables=variables,
        skipped_updates=skipped,
        nonfinite_source=source,
    )
    return state, jax.tree.map(jnp.mean, metrics)


LOSSES = ("losses/actor_loss", "losses/critic_loss", "losses/regularization")
NONFINITE_NAMES = (*LOSSES, "gradient")
"""What an update checks before it is applied, in the order in which trouble spreads."""


def ppo_loss(
    config: PPOConfig, params: nnx.State, graphdef: nnx.GraphDef, variables: nnx.State, batch: Minibatch
) -> tuple[Float[Array, ""], tuple[dict[str, Array], nnx.State]]:
    """Clipped surrogate, value and regularization loss of a minibatch.

    Returns:
      The loss, and (metrics, network variables after the call).
    """
    output, regularization, variables = replay(graphdef, params, variables, batch)
    log_ratios, actor_losses = [], {}
    for name, new, old, advantage in pair_heads(config, output.loglikelihoods, batch):
        log_ratios.append(new - old)
        actor_losses[name] = clipped_surrogate(new - old, advantage, config.clip_range)
    critic_losses = jax.tree.map(
        lambda value, target: 0.5 * jnp.mean((value - target) ** 2), output.value_estimates, batch.targets
    )
    actor_loss = sum(actor_losses.values())
    critic_loss = sum(jax.tree.leaves(critic_losses))
    regularization = jnp.mean(regularization)
    total = actor_loss + config.critic_loss_weight * critic_loss + regularization
    metrics = {
        "losses/actor_loss": actor_loss,
        "losses/critic_loss": critic_loss,
        "losses/regularization": regularization,
        "losses/entropy": mean_entropy(output),
        "losses/total": total,
        "losses/approx_kl": jnp.mean(jnp.stack([approximate_kl(log_ratio) for log_ratio in log_ratios])),
    }
    if len(actor_losses) > 1:
        metrics |= {f"losses/actor_loss/{name}": loss for name, loss in actor_losses.items()}
    if jax.tree.structure(critic_losses).num_leaves > 1:
        metrics |= flatten("losses/critic_loss", critic_losses)
    if LoggingLevel.ACTOR_EXTRA in config.logging_level:
        outside = [jnp.abs(jnp.expm1(log_ratio)) > config.clip_range for log_ratio in log_ratios]
        metrics["losses/clipping_fraction"] = jnp.mean(jnp.stack(outside), dtype=jnp.float32)
        if output.stds is not None:
            stds = [std.reshape(-1) for std in jax.tree.leaves(output.stds)]
            metrics["losses/policy_std"] = jnp.mean(jnp.concatenate(stds))
    return total, (metrics, variables)


def approximate_kl(log_ratio: Float[Array, "..."]) -> Float[Array, ""]:
    """Mean of (r - 1) - log r, which estimates KL(old || new) with little variance and is never negative."""
    return jnp.mean(jnp.expm1(log_ratio) - log_ratio)


def clipped_surrogate(
    log_ratio: Float[Array, "..."], advantage: Float[Array, "..."], clip_range: float
) -> Float[Array, ""]:
    """-E[min(r A, clip(r, 1 - eps, 1 + eps) A)], the ratio r = new / old likelihood (PPO paper, eq. 7)."""
    # An overflowing ratio would make the gradient NaN, also where the minimum is the clipped branch.
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    clipped = jnp.clip(ratio, 1 - clip_range, 1 + clip_range)
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))


def replay(
    graphdef: nnx.GraphDef, params: nnx.State, variables: nnx.State, batch: Minibatch
) -> tuple[Any, Float[Array, "..."], nnx.State]:
    """The network's output and regularization loss on stored sequences, leaves [time, batch, ...].

    Where steps do not depend on each other they are one large batch; only recurrent layers are scanned.
    """
    network = functional.merge(graphdef, params, variables)
    out = functional.over_time(network, batch.network_states, batch.obs, batch.rollout_extras, batch.done)
    return out.output, out.regularization_loss, functional.split(network)[2]


def pair_heads(config: PPOConfig, loglikelihoods: Any, batch: Minibatch) -> list[tuple[str, Any, Any, Any]]:
    """Which advantage drives which action head: (name, new and old log-likelihood, advantage) for each actor loss.

    With one reward term every head learns from it. With several, `combine_advantages` sums them for every head;
    otherwise a joint policy has one loss per term, and several heads take the term of their own name.
    """
    heads, old = flatten("", loglikelihoods), flatten("", batch.old_loglikelihoods)
    terms = flatten("", batch.advantages)
    normalize = lambda advantage: own_share(normalized(advantage) if config.normalize_advantages else advantage, axis=1)
    if config.combine_advantages or len(terms) == 1:
        total = normalize(sum(terms.values()))
        return [(name.lstrip("/"), heads[name], old[name], total) for name in heads]
    if len(heads) == 1:
        ((name, head),) = heads.items()
        return [(term.lstrip("/"), head, old[name], normalize(terms[term])) for term in terms]
    if heads.keys() != terms.keys():
        raise ValueError(
            f"the action heads are {names_of(heads)} and the reward terms {names_of(terms)}. Where both are several, "
            "each head learns from the term of its own name: give them the same names, or set "
            "PPOConfig(combine_advantages=True) to let every head learn from the sum."
        )
    return [(name.lstrip("/"), heads[name], old[name], normalize(terms[name])) for name in heads]


def normalized(advantage: Any) -> Float[Array, "..."]:
    """Zero mean and unit variance."""
    return (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)


def mean_entropy(output: Any) -> Float[Array, ""]:
    """Entropy summed over action heads, averaged over the batch.

    Where a sampler does not tell its entropy, it is estimated by the negative log-likelihood of the stored actions.
    """
    if output.entropies is not None:
        return sum(jnp.mean(entropy) for entropy in jax.tree.leaves(output.entropies))  # type: ignore[return-value]
    return -sum(jnp.mean(head) for head in jax.tree.leaves(output.loglikelihoods))  # type: ignore[return-value]


def update_statistics(config: PPOConfig, state: TrainingState, transitions: Transition) -> TrainingState:
    """Let the network fold what the rollout saw into its statistics.

    Whenever what normalises their input moves, actor and critic have to learn anew what they knew. A learning rate on
    its way to zero cannot keep up, so statistics come to rest as it does: they go its share of every step.
    """
    network = functional.merge(state.graphdef, state.params, state.variables)
    network.update_statistics(transitions.rollout_extras)
    variables = functional.split(network)[2]
    if config.learning_rate_schedule == "linear":
        share = scheduled_share(config, state.iteration)

        def part_way(old: jax.Array, new: jax.Array) -> jax.Array:
            if not jnp.issubdtype(new.dtype, jnp.floating):
                return new
            return jnp.where((new == old) | ~jnp.isfinite(new - old), new, old + share * (new - old))

        variables = jax.tree.map(part_way, state.variables, variables)
    return state.replace(variables=variables)


# --- the first state ------------------------------------------------------------------------------------------


def initial_training_state(env: RLEnv, networks: StatefulModule, config: TrainConfig) -> TrainingState:
    """The state before the first iteration; all randomness derives from `config.seed`."""
    program, inputs = lower_initial_state(env, networks, config)
    return functional.compile_quickly(program)(*inputs)


def lower_initial_state(env: RLEnv, networks: StatefulModule, config: TrainConfig) -> tuple[jax.stages.Lowered, Any]:
    """`initial_training_state` as one program that is not compiled yet, and what to call it with.

    The program knows the shapes of its result, so what consumes that can be compiled at the same time.

    Raises:
      TypeError: the environment's step changes the shape or type of its state.
    """
    graphdef, params, variables = functional.split(networks)
    graphdef = functional.training_graphdef(graphdef, params, variables)
    params, variables = place_network((params, variables))
    inputs = (run_key(config.seed), params, variables)
    return jax.jit(functools.partial(first_training_state, env, config.ppo, graphdef)).lower(*inputs), inputs


def first_training_state(
    env: RLEnv, config: PPOConfig, graphdef: nnx.GraphDef, key: jax.Array, params: nnx.State, variables: nnx.State
) -> TrainingState:
    """`initial_training_state` of a network in training mode that is split already; pure."""
    env_states = first_env_states(env, key, config.n_envs)
    network_states = functional.merge(graphdef, params, variables).initialize_state(config.n_envs)
    out = functional.output_shapes(graphdef, params, variables, network_states, env_states.obs)
    rollout.check_step_keeps_shapes(env, env_states, out.output.actions)
    state = TrainingState(
        params=params,
        variables=variables,
        optimizer=new_optimizer_state(config, params),
        network_states=network_states,
        env_states=env_states,
        rng_key=key,
        iteration=jnp.zeros((), jnp.int32),
        steps=jnp.zeros(2, jnp.uint32),
        skipped_updates=jnp.zeros((), jnp.int32),
        nonfinite_source=jnp.zeros((), jnp.int32),
        nonfinite_steps=jnp.zeros((), jnp.uint32),
        graphdef=graphdef,
    )
    return spread_state(state)


def new_training_state(
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    seed: int,
    learning_rate: float = 1e-4,
    gradient_clipping: float | None = None,
    weight_decay: float | None = None,
) -> TrainingState:
    """`initial_training_state` with the arguments of nnx-ppo 0.3."""
    ppo = PPOConfig(
        n_envs=n_envs,
        n_minibatches=1,
        learning_rate=learning_rate,
        gradient_clipping=gradient_clipping,
        weight_decay=weight_decay,
    )
    return initial_training_state(env, networks, TrainConfig(ppo=ppo, seed=seed))


def first_env_states(env: RLEnv, key: jax.Array, n_envs: int, iteration: int | jax.Array = 0) -> Any:
    """The very first states, with their time limits spread if the environment knows how (`randomize_phase`)."""
    states = rollout.reset(env, stream_key(key, Stream.INITIAL_RESET, iteration), n_envs)
    if hasattr(env, "randomize_phase"):
        keys = numbered_keys(stream_key(key, Stream.EPISODE_PHASE, iteration), jnp.arange(n_envs))
        states = jax.vmap(env.randomize_phase)(states, keys)  # type: ignore[attr-defined]
    return states


def with_env_states(env: RLEnv, state: TrainingState, config: PPOConfig) -> TrainingState:
    """A loaded state, its environment states in the structure that `env` has; fresh ones if none were saved."""
    if isinstance(state.env_states, SavedLeaves):
        first = jax.jit(functools.partial(first_env_states, env, n_envs=config.n_envs))
        if saved := state.env_states.leaves:
            check_n_envs(next(iter(saved.values())).shape[0], config)
            return state.replace(env_states=place(saved, "env_states", jax.eval_shape(first, state.rng_key)))
        network = functional.merge(state.graphdef, state.params, state.variables)
        return state.replace(
            env_states=first(state.rng_key, iteration=state.iteration),
            network_states=network.initialize_state(config.n_envs),
        )
    check_n_envs(state.env_states.done.shape[0], config)
    return state


def check_n_envs(n_envs: int, config: PPOConfig) -> None:
    """Refuse a state of another number of environments."""
    if n_envs != config.n_envs:
        raise ValueError(
            f"the initial state has {n_envs} environments and the configuration n_envs={config.n_envs}; "
            f"go on with n_envs={n_envs}."
        )


def has_replay_record(env: RLEnv, env_states: Any) -> bool:
    """Whether `env.replay_record` works on its states; a wrapper may pass the method on and change the state."""
    try:
        jax.eval_shape(jax.vmap(env.replay_record), env_states)  # type: ignore[attr-defined]
    except Exception:
        return False
    return True


def check_same_terms(rewards: Any, values: Any) -> None:
    """Refuse a critic whose heads are not the environment's reward terms."""
    given, expected = flatten("", values), flatten("", rewards)
    if given.keys() != expected.keys():
        raise ValueError(
            f"the critic estimates values for {names_of(given)} and the environment gives rewards for "
            f"{names_of(expected)}. Each reward term needs a value estimate of its own name."
        )


def names_of(terms: dict[str, Any]) -> str:
    """The names of a flattened tree, for a message."""
    return ", ".join(repr(name.lstrip("/")) if name else "a single one" for name in terms)
