# MuJoCo's bindings are compiled and come without types, so pyright sees no attribute of the module.
from typing import Any

def __getattr__(name: str) -> Any: ...
