"""Where metrics go: sinks, and the `Logger` that feeds them without slowing training.

Every sink is itself a `log_fn`, a callable `sink(metrics, steps)`, and so is `Logger`:

    with Logger(JsonLines("run/metrics.jsonl"), Console(total_steps), TensorBoard("run")) as logger:
        train_ppo(env, networks, config, log_fn=logger, video_fn=logger.video_fn)
"""

from nnx_ppo.loggers.console import Console
from nnx_ppo.loggers.jsonl import JsonLines
from nnx_ppo.loggers.memory import Memory
from nnx_ppo.loggers.plotting import plot_learning_curve
from nnx_ppo.loggers.reading import read_records, read_scalars
from nnx_ppo.loggers.tensorboard import TensorBoard
from nnx_ppo.loggers.wandb_sink import Wandb
from nnx_ppo.loggers.writer import Logger, SinkUnavailable

__all__ = [
    "Console",
    "JsonLines",
    "Logger",
    "Memory",
    "SinkUnavailable",
    "TensorBoard",
    "Wandb",
    "plot_learning_curve",
    "read_records",
    "read_scalars",
]
