"""What the schedule has learned, to begin another run with."""

import hashlib
import json
import logging
import os
from pathlib import Path
from threading import Lock
from typing import Any

from transformers import PreTrainedModel

from ..checked_file import write
from .acceptance import Acceptance, Kind, Tally
from .cost import Place, RoundCost

logger = logging.getLogger(__name__)

FORMAT = "hf_specstate.spec_profile"
VERSION = 1


class SpecProfile:
    """
    How much drafts of each kind were worth, and what rounds cost: what the `"goodput"` schedule otherwise finds out
    anew in each call (acceptance) or in each process (cost). Pass an empty one as `generate(spec_profile=...)` and it
    is filled when the call ends; pass it again, or save it and load it into the next run, and that begins where this
    one ended. It holds no text. A call whose model, assistant, device or batch size is another one than the profile's
    leaves it alone, and says so.
    """

    def __init__(self) -> None:
        self._fits: dict[str, Any] = {}
        self._seconds: dict[int, float] = {}
        self._overhead = 0.0
        self._tallies: dict[Kind, list[float]] = {}
        self._vectors: dict[tuple[str, int], list[float]] = {}
        self._lock = Lock()

    def __repr__(self) -> str:
        if not self._fits:
            return "SpecProfile(empty)"
        fits = self._fits
        return f"SpecProfile({fits['model']}, {fits['rows']} rows on {fits['device']}, {len(self._tallies)} kinds)"

    def begin(
        self, model: PreTrainedModel, assistant: PreTrainedModel | None, place: Place
    ) -> tuple[Acceptance, RoundCost | None]:
        """What is known for a generation, as copies that it may learn on; nothing if the profile is of another kind."""
        with self._lock:
            fits = _what_fits(model, assistant, place)
            differing = [name for name, value in fits.items() if self._fits and self._fits.get(name) != value]
            if differing:
                logger.warning(
                    "`spec_profile` is not used: it was made for another %s.",
                    " and another ".join("number of rows" if name == "rows" else name for name in sorted(differing)),
                )
            if differing or not self._fits:
                return Acceptance(), None
            tallies = {kind: Tally(*numbers) for kind, numbers in self._tallies.items()}
            vectors = {key: list(numbers) for key, numbers in self._vectors.items()}
            return Acceptance(tallies, vectors), RoundCost(self._seconds, self._overhead)

    def learn(
        self,
        model: PreTrainedModel,
        assistant: PreTrainedModel | None,
        place: Place,
        acceptance: Acceptance,
        cost: RoundCost,
    ) -> None:
        """Keeps what a generation has learned, if it was one of the profile's kind."""
        fits = _what_fits(model, assistant, place)
        with self._lock:
            if self._fits and self._fits != fits:
                return
            self._fits, self._seconds, self._overhead = fits, cost.remembered, cost.overhead
            self._vectors = {key: list(numbers) for key, numbers in acceptance.vectors.items()}
            self._tallies = {
                kind: [tally.prior, tally.seen, tally.happened, tally.expected]
                for kind, tally in acceptance.pooled.items()
            }

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file. It appears under its name when it is complete."""
        with self._lock:
            content = {
                "format": FORMAT,
                "version": VERSION,
                "fits": self._fits,
                "forward_seconds": {str(width): seconds for width, seconds in self._seconds.items()},
                "overhead_seconds": self._overhead,
                "acceptance": [[*kind, *numbers] for kind, numbers in self._tallies.items()],
                "vectors": [[*key, *numbers] for key, numbers in self._vectors.items()],
            }
        write(path, json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "SpecProfile":
        """
        Reads what `save` wrote.

        Raises:
            ValueError: it is damaged, of a newer version, or no profile.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"it is {content['format']!r}")
            version = int(content["version"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} holds no profile, or is damaged: {error}.") from error
        if version > VERSION:
            raise ValueError(f"{path} was written by a newer version of this package (format {version}).")
        profile = cls()
        try:
            profile._read(content)
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
            raise ValueError(f"{path} is damaged: {error}.") from error
        return profile

    def _read(self, content: dict[str, Any]) -> None:
        self._fits = dict(content["fits"])
        self._overhead = float(content["overhead_seconds"])
        self._seconds = {int(width): float(seconds) for width, seconds in content["forward_seconds"].items()}
        if (
            any(not 0 < value < 1e6 for value in (*self._seconds, *self._seconds.values()))
            or not 0 <= self._overhead < 1e6
        ):
            raise ValueError("there are no such times")
        for source, confidence, depth, *numbers in content["acceptance"]:
            prior, seen, happened, expected = map(float, numbers)
            if not (prior > 0 and 0 <= happened <= seen and 0 <= expected <= seen < 1e9):
                raise ValueError("there is no such acceptance")
            self._tallies[str(source), int(confidence), int(depth)] = [prior, seen, happened, expected]
        for source, depth, *numbers in content["vectors"]:
            accepted, seen = map(float, numbers)
            if not 0 <= accepted <= seen < 1e9:
                raise ValueError("there is no such acceptance")
            self._vectors[str(source), int(depth)] = [accepted, seen]


def _what_fits(model: PreTrainedModel, assistant: PreTrainedModel | None, place: Place) -> dict[str, Any]:
    device = [place.device, place.dtype]
    device += [f"{place.threads} threads"] * bool(place.threads) + ["few_rows"] * place.few_rows
    device += ["static cache"] * place.fixed_slots
    return {
        "model": _digest(model),
        "assistant": None if assistant is None else _digest(assistant),
        "device": ", ".join(device),
        "rows": place.rows,
    }


def _digest(model: PreTrainedModel) -> str:
    config = {name: value for name, value in model.config.to_dict().items() if name != "transformers_version"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return f"{type(model).__name__} {digest[:16]}"
