"""The Hugging Face hub: a quick test of the connection, and clear errors."""

import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from data_pipeline.work.tasks import NO_ROOM
from lineage.errors import DataMissing, Interrupted

TIMEOUT_SECONDS = 5.0


@cache
def hub_is_reachable() -> bool:
    """Ask the hub once per process. `HF_HUB_OFFLINE` and `HF_ENDPOINT` are honoured.

    Name resolution has no timeout of its own, so the question is asked in a thread that is abandoned.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(_answers()), daemon=True)
    thread.start()
    thread.join(2 * TIMEOUT_SECONDS)
    return bool(answers and answers[0])


def _answers() -> bool:
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return bool(response.status < 500)
    except (OSError, ValueError):
        return False


@contextmanager
def asking_for(what: str) -> Iterator[None]:
    """Turn the errors of the hub's clients into one sentence.

    Raises DataMissing if the hub does not have the repository or gates it, Interrupted if it stops answering. Disk
    errors of this machine are passed on.
    """
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:  # the hub's clients raise errors of many libraries
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        # what is not in the cache was asked of the hub in vain: that says nothing of what the hub has
        causes = [cause for cause in _causes(error) if not isinstance(cause, errors.LocalEntryNotFoundError)]
        if any(isinstance(cause, errors.GatedRepoError) for cause in causes):
            raise DataMissing(f"{what} is behind a gate on the hub: accept its terms there and set HF_TOKEN") from error
        absent = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
        if any(isinstance(cause, absent) for cause in causes):
            raise DataMissing(f"the Hugging Face hub has no {what}") from error
        said = f"{what} could not be read from the Hugging Face hub: {str(error).partition(chr(10))[0]}"
        raise Interrupted(f"{said}; give the same command again, what came is kept") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__
