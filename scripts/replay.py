#!/usr/bin/env python
"""Repeat in MuJoCo what went non-finite in training: `python scripts/replay.py RUN/nonfinite/step_..._env_....npz`."""

import argparse
import sys
import zipfile
from pathlib import Path

import numpy as np

from tasks.launch.run_folder import RunFolder, RunFolderError


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each step; returns 0, or 2 if there is nothing to repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a file of RUN/nonfinite/")
    path = parser.parse_args(argv).file.resolve()
    try:
        run = RunFolder.read(path.parent.parent)
        if not path.is_file():
            raise RunFolderError(f"there is no file {str(path)!r}; {path.parent} has what was kept.")
        replay(run, path)
    except (RunFolderError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def replay(run: RunFolder, path: Path) -> None:
    """Take each recorded step in MuJoCo, from its state with its control, and print how large everything becomes."""
    import mujoco

    from tasks.registry import load_task

    record = run.read_record()
    task = load_task(str(run.task_file(record)) if record.task_file else record.task)
    env = task.make_env("native")
    model, data = env.mj_model, mujoco.MjData(env.mj_model)
    # Else MuJoCo would move an unstable simulation back to its start, and hide what happened.
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    with np.load(path, allow_pickle=False) as saved:
        fields = {name: saved[name] for name in saved.files}
    controls = fields.pop("ctrl_next")
    print(f"{len(controls)} steps of {task.name}, {env.n_substeps} physics steps each; the largest magnitude of")
    print("  step      time    control   position   velocity  acceleration  contacts  warnings")
    for i, control in enumerate(controls):
        # Training rounds to float32 between control steps: from where it was, not from where MuJoCo would be.
        for name, values in fields.items():
            setattr(data, name, values[i])
        data.ctrl[:] = control
        mujoco.mj_step(model, data, env.n_substeps)
        largest = [np.max(np.abs(x), initial=0.0) for x in (control, data.qpos, data.qvel, data.qacc)]
        warned = [str(mujoco.mjtWarning(k).name) for k in range(len(data.warning)) if data.warning[k].number]
        print(
            f"  {i + 1:4} {data.time:9.3f}  {largest[0]:9.3g}  {largest[1]:9.3g}  {largest[2]:9.3g}  {largest[3]:12.3g}"
            f"  {data.ncon:8}  {', '.join(warned) or '-'}"
        )
        if not all(map(np.isfinite, largest)):
            print("  not finite any more")
            return
    print("  still finite: the reward or the observation was not, or another physics engine differs")


if __name__ == "__main__":
    sys.exit(main())
