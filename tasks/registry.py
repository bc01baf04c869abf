"""Which tasks there are, and how a name or a file becomes one. Imports no JAX."""

import importlib
import importlib.util
import sys
from pathlib import Path

from nnx_ppo.algorithms.config import did_you_mean
from tasks.task import Task

TASKS = {
    "humanoid": "tasks.humanoid",
    "cartpole_swingup": "tasks.cartpole_swingup",
    "cartpole_balance": "tasks.cartpole_balance",
}
"""Name to module. A task of yours need not be here: `--task path/to/file.py` takes any file that defines `TASK`."""


class TaskNotFound(ValueError):
    """No task of this name, or no `TASK` in this file."""


def task_names() -> list[str]:
    """The names that `load_task` takes."""
    return list(TASKS)


def load_task(name_or_path: str) -> Task:
    """The task of this name, or the one that a Python file defines as `TASK`.

    Raises:
      TaskNotFound: there is none; the message names the nearest, or says what the file lacks.
    """
    if name_or_path in TASKS:
        return _task_of(importlib.import_module(TASKS[name_or_path]), name_or_path)
    if name_or_path.endswith(".py") or "/" in name_or_path:
        return load_task_file(Path(name_or_path))
    raise TaskNotFound(
        f"there is no task {name_or_path!r}{did_you_mean(name_or_path, TASKS)}. Accepted: {', '.join(TASKS)}, or the "
        "path of a Python file that defines TASK = Task(...)."
    )


def load_task_file(path: Path) -> Task:
    """The `TASK` of a Python file outside this package; its folder becomes importable, as with `python file.py`.

    Raises:
      TaskNotFound: there is no such file, or it defines no `TASK`.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.py")])
        raise TaskNotFound(
            f"there is no task file {str(path)!r}{near}. Give the path of a Python file that defines TASK = Task(...), "
            f"or one of the names {', '.join(TASKS)}."
        )
    module_name = f"task_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TaskNotFound(f"{str(path)!r} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # Dataclasses and pickling look their module up.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return _task_of(module, str(path))


def _task_of(module: object, origin: str) -> Task:
    task = getattr(module, "TASK", None)
    if not isinstance(task, Task):
        found = "no TASK" if task is None else f"TASK of type {type(task).__name__}"
        raise TaskNotFound(
            f"{origin} defines {found}. It must define TASK = Task(name=..., summary=..., make_env=..., "
            "make_networks=..., config=...), with Task from `tasks`."
        )
    return task
