"""Names for the leaves of a pytree: the keys of metrics, messages and checkpoints."""

from typing import Any

import jax


def flatten(prefix: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree as `prefix/<path>`; a bare leaf as `prefix`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join([prefix, *map(path_entry, path)]): leaf for path, leaf in leaves}


def path_entry(entry: Any) -> str:
    """One step of a tree path as a word: a dict key, an attribute or an index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
