"""Checks that share a time budget: each prints one line and leaves one JSON line, whatever happens in it."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LEAST_SECONDS = 3.0  # with less left a check is not begun
FAILURES = ("fault", "failed")


class TimeUp(BaseException):  # like KeyboardInterrupt: nobody's to handle on its way up
    """A check has used up its time."""


class FaultError(Exception):
    """A check has found what must not be."""


class BoundedChecks:
    """
    Args:
        folder (`Path`): Where JSON lines go; made if it is not there.
        seconds (`float`): For all checks together.
    """

    def __init__(self, folder: Path, seconds: float):
        self.folder = folder
        self.statuses: list[str] = []
        self._deadline = time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def has_failed(self) -> bool:
        return any(status in FAILURES for status in self.statuses)

    def run(self, name: str, limit: float, check: Callable[[], str]) -> None:
        """
        Args:
            name (`str`): Of the check.
            limit (`float`): Seconds that it may take at most, if as much is left.
            check (`Callable[[], str]`): Says what it found; raises [`FaultError`] if that must not be.
        """
        start = time.monotonic()
        seconds = min(limit, self._deadline - start)
        if seconds < LEAST_SECONDS:
            self._conclude(name, "skipped", "no time left", 0.0)
            return
        try:
            with time_limit(seconds):
                status, detail = "ok", check()
        except TimeUp:
            status, detail = "unfinished", f"stopped after {seconds:.0f} s"
        except FaultError as fault:
            status, detail = "fault", str(fault)
        except Exception as error:
            status, detail = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        self._conclude(name, status, detail, time.monotonic() - start)

    def write(self, file: str, *records: dict[str, Any]) -> None:
        """Adds JSON lines to a file in the folder."""
        with (self.folder / file).open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)

    def _conclude(self, name: str, status: str, detail: str, seconds: float) -> None:
        self.statuses.append(status)
        print(f"{status:10} {name} ({seconds:.1f} s): {detail}", flush=True)
        record = {"type": "check", "name": name, "status": status, "detail": detail, "seconds": round(seconds, 2)}
        self.write("checks.jsonl", record)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises [`TimeUp`] in the main thread once `seconds` have passed."""

    def interrupt(signum, frame):
        raise TimeUp

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
