"""Meeting of the ranks of one machine at a file: no port is opened, so no other user can join or send anything."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "vlmrl-file"


class FileMeeting(RendezvousHandler):
    """Rendezvous of the only agent of a job. Its store is a file in the launcher's folder."""

    def __init__(self, store: Path, run_id: str) -> None:
        self._path, self._run_id = store, run_id

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, FileStore(str(self._path), -1))
        # The ranks meet at a file, too (`dist.world.MEETING_VARIABLE`): nothing listens at this address.
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _meeting(parameters: RendezvousParameters) -> RendezvousHandler:
    return FileMeeting(Path(parameters.endpoint), parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _meeting)
