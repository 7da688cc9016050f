"""What a run is trained on must stay what it was: of a dataset that changed meanwhile nothing is kept."""

import os

from engine.data.dataset import DatasetFacts
from engine.guard import Guard
from engine.parallel.mesh import ParallelMesh
from lineage.verified import touches_of


class InputGuard(Guard):
    """Looks on each node whether a file of the datasets was touched, and reads them again if one was."""

    def __init__(self, dataset: DatasetFacts, mesh: ParallelMesh) -> None:
        self._dataset, self._mesh = dataset, mesh
        self._touches = self._look()

    def before_checkpoint(self) -> None:
        """Raises IntegrityFailure, on every rank, where a dataset is not what it was."""
        with self._mesh.all_or_none():
            if os.environ.get("LOCAL_RANK", "0") == "0" and (touches := self._look()) != self._touches:
                self._dataset.check()
                self._touches = touches

    def _look(self) -> list[dict[str, list[int]]]:
        return [touches_of(directory) for directory in self._dataset.directories]
