"""Whether the Hugging Face hub can be reached, answered within seconds."""

import os
import threading
import urllib.request
from functools import cache

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
