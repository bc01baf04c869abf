"""Paths to modules as users know them: `1/action/0`, as in metrics and in error messages."""

from typing import Any

ATTRIBUTES = ("layers", "components")
"""Where containers keep their children; not part of a child's name."""


def module_path(path: tuple[Any, ...]) -> str:
    """The path of a module in the network, from its path in the nnx graph.

    Args:
      path: as `nnx.iter_modules` gives it.
    """
    # A child may itself be called "layers": only every other entry can be such an attribute.
    words, expect_attribute = [], True
    for entry in path:
        if expect_attribute and entry in ATTRIBUTES:
            expect_attribute = False
            continue
        words.append(str(entry))
        expect_attribute = True
    return "/".join(words)
