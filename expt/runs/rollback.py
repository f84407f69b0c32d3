"""A resumed run's record and numbers as they were, in case its workers refuse to continue."""

from __future__ import annotations

import shutil

from expt.runs.checkpoint_file import link
from expt.runs.paths import RunPaths


class Rollback:
    """The earlier content of a run's folder, which is kept until the workers accept the new one."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._kept = paths, paths.before

    def save(self) -> None:
        """Keep the content as it is, unless an attempt that was killed before has kept it.

        Its files are replaced as a whole, so links are enough.
        """
        paths, kept = self._paths, self._kept
        if kept.exists():
            return
        temporary = kept.with_name(f"{kept.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for path in (paths.result, paths.metrics):
            if path.exists():
                link(path, temporary / path.name)
        if paths.checkpoints.exists():
            (temporary / paths.checkpoints.name).touch()
        temporary.rename(kept)

    def commit(self) -> None:
        """Remove what is kept: the run continues, or has begun again."""
        shutil.rmtree(self._kept, ignore_errors=True)

    def restore(self) -> bool:
        """Put the earlier content back; return whether that was a run's."""
        paths, kept = self._paths, self._kept
        if not kept.exists():
            return False
        was_run = (kept / paths.result.name).exists()
        for path in (paths.result, paths.metrics):
            if (kept / path.name).exists():
                (kept / path.name).replace(path)
            elif path != paths.result:
                path.unlink(missing_ok=True)
        if not (kept / paths.checkpoints.name).exists():
            shutil.rmtree(paths.checkpoints, ignore_errors=True)
        self.commit()
        return was_run
