"""What is found by looking at a trace."""

import jax
import jax.numpy as jnp
import pytest

from nnx_ppo.algorithms.jaxprs import largest_matrix, reads


def loop(length):
    """Substeps that read `a`, hand on `b` unread until the third (through `c`), and work out `d` anew."""

    def body(state, _):
        a, b, c, d = state["a"], state["b"], state["c"], state["d"]
        return {"a": a + c, "b": jnp.sin(a), "c": b, "d": a * 2}, d * 0 + a

    return lambda state: jax.lax.scan(body, state, None, length=length)[0]


STATE = {name: jnp.ones(()) for name in "abcd"}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s: s, "abcd"),  # handed on as it is, which the caller may look at
        (lambda s: s["a"] * 2, "a"),
        (lambda s: (jnp.sin(s["b"]), s["a"])[1:], "a"),  # what nobody returns does not count
        (lambda s: {**s, "b": jnp.zeros(())}, "acd"),
        (jax.jit(lambda s: {**s, "b": jnp.zeros(())}), "acd"),
        (jax.jit(lambda s: jax.jit(lambda x, y: x)(s["a"], s["b"])), "a"),
        (lambda s: jnp.zeros(()), ""),
        (loop(2), "abc"),
        (loop(1), "abc"),
        (loop(0), "abcd"),  # no pass works anything out
        (lambda s: loop(3)(s)["c"], "abc"),
        (lambda s: jax.lax.cond(s["a"] > 0, lambda s: s["b"], lambda s: 0.0, s), "abcd"),  # not looked into
        (lambda s: jax.lax.while_loop(lambda x: x < 9, lambda x: x * s["b"], s["a"]), "ab"),
        (lambda s: jax.lax.scan(lambda c, x: (c + s["d"] * 0, x), s["a"], jnp.stack([s["b"]] * 2))[1], "b"),
        (lambda s: jax.lax.scan(lambda c, x: (c + s["d"], c), s["a"], jnp.stack([s["b"]] * 2))[1], "ad"),
    ],
)
def test_an_argument_is_read_if_a_result_depends_on_it(function, expected):
    assert "".join(name for name, read in zip("abcd", reads(function, STATE), strict=True) if read) == expected


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (jnp.linalg.cholesky, 5),
        (jnp.linalg.inv, 5),
        (jnp.linalg.qr, 5),
        (jnp.linalg.eigh, 5),
        (jnp.linalg.svd, 5),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.vmap(jnp.linalg.cholesky)(y[None])[0], x), 5),
        (lambda x: jnp.linalg.cholesky(x[:2, :2]) @ x[:2] + jnp.linalg.cholesky(x[:3, :3])[:2, :1], 3),
        (lambda x: x @ x, 0),
    ],
)
def test_the_largest_matrix_is_that_of_any_factorization_also_inside_of_loops(function, size):
    assert largest_matrix(function, jnp.eye(5)) == size
