"""describe: a network as a table, one line per module, with its number of parameters."""

from typing import Any

import jax
from flax import nnx

from nnx_ppo.networks.module_paths import module_path
from nnx_ppo.networks.types import StatefulModule


def describe(networks: StatefulModule) -> str:
    """A table of the modules: path, kind, sizes, parameters (those of the modules inside included).

    A module that is used in several places is counted where it comes first.
    """
    rows, seen = [], set()

    def visit(path: tuple[Any, ...], node: Any) -> int:
        if isinstance(node, nnx.Variable):
            if id(node) in seen or not isinstance(node, nnx.Param):
                return 0
            seen.add(id(node))
            return sum(leaf.size for leaf in jax.tree.leaves(node.get_value()))
        if not isinstance(node, nnx.Pytree):
            return 0
        again = id(node) in seen
        seen.add(id(node))
        row = None
        if isinstance(node, StatefulModule):
            row = len(rows)
            rows.append([module_path(path) or "network", type(node).__name__, sizes_of(node), ""])
            if again:
                rows[row][3] = "(above)"
                return 0
        elif again:
            return 0
        total = sum(visit((*path, name), child) for name, child in children_of(node))
        if row is not None:
            rows[row][3] = f"{total:,}"
        return total

    visit((), networks)
    header = ["module", "kind", "sizes", "parameters"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(4)]

    def line(row: list[str]) -> str:
        *words, number = row
        return "  ".join([*map(str.ljust, words, widths), number.rjust(widths[3])])

    return "\n".join([line(header), *map(line, rows)])


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """Name and value of what an nnx node holds, in the order in which containers use it."""
    if isinstance(node, nnx.List):
        return list(enumerate(node))
    children = {name: value for name, value in vars(node).items() if not name.startswith("_")}
    names = children.get("names")
    if isinstance(names, tuple):
        for attribute in ("layers", "components"):
            held = children.get(attribute)
            if isinstance(held, nnx.Dict):
                # nnx sorts a dict when it splits a network; the container knows the order.
                del children[attribute]
                children |= {name: held[name] for name in names}
    return list(children.items())


def sizes_of(module: Any) -> str:
    """`in -> out` as far as the module says."""
    out = next((getattr(module, name) for name in OUTPUT_SIZES if hasattr(module, name)), None)
    given = next((getattr(module, name) for name in INPUT_SIZES if hasattr(module, name)), None)
    if out is None:
        return ""
    return f"{given} -> {out}" if given is not None else f"{out}"


INPUT_SIZES = ("in_features", "image_shape")
OUTPUT_SIZES = ("out_features", "hidden_features", "latent_size", "action_size")
