"""Tasks: an environment, a network and a tuned configuration under one name. See `tasks/task.py`."""

from tasks.registry import load_task as load_task
from tasks.registry import task_names as task_names
from tasks.task import Evidence as Evidence
from tasks.task import Task as Task
