"""What was written in earlier calls, kept to draft from, when the user asks for it."""

import hashlib
import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch

from .checked_file import pack, unpack, write
from .drafting.recycling import SuccessorTable
from .drafting.suffix_index import SuffixIndex
from .host import from_host, to_host

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "hf_specstate.draft_history"
VERSION = 1
EVERYBODY = ""  # the tenant of texts that have none
LARGEST_TOKEN = 2**31 - 1  # what the index has room for
MOST_TABLES = 16  # of successors, which lie on the target's device


class DraftHistory:
    """
    Texts of earlier calls for the `history` and `recycling` drafters. Pass it as `draft_history=` to `generate()`, or
    to [`enable`] for all speculative calls of a model; prompts and outputs are added when a call ends. Without one,
    nothing outlives a call: reuse across users tells one user, by the speed of an answer, what another has written.

    Bounded by `max_tokens`: when it is full, the oldest texts go first, whoever wrote them. A text that it holds
    already is not added again. Texts of different tenants never meet, see [`~DraftHistory.for_tenant`]. Threads may
    share it. A million tokens take about 34 MiB, and the successors of a tenant 4.5 MiB on the target's device, for the
    16 tenants that came last.

    Args:
        max_tokens (`int`, *optional*, defaults to 1,000,000): Most tokens that are kept.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Whose tokens they are; lets [`~DraftHistory.load`] refuse others.
    """

    def __init__(self, max_tokens: int = 1_000_000, tokenizer: "PreTrainedTokenizerBase | None" = None):
        asked: Any = max_tokens  # maybe one of NumPy's integers
        if not isinstance(asked, Integral) or isinstance(asked, bool) or asked < 1:
            raise ValueError(f"`max_tokens` must be an integer of at least 1, got {max_tokens!r}.")
        self.max_tokens = int(max_tokens)
        self.vocab_size: int | None = None  # of the model that it was first used with
        self._vocabulary = None if tokenizer is None else _fingerprint(tokenizer)
        self._indexes: dict[str, SuffixIndex] = {}  # by tenant
        self._tables: OrderedDict[str, SuccessorTable] = OrderedDict()  # by tenant; the one that came last stands last
        # (tenant, tokens, digest), oldest first: what counts; everything else can be made from it again
        self._texts: deque[tuple[str, array, bytes]] = deque()
        self._known: set[tuple[str, bytes]] = set()
        self._size = 0
        self._is_changing = False  # still, when an operation begins: the one before it was interrupted
        self._lock = RLock()

    def __len__(self) -> int:
        """Tokens that are kept."""
        with self._whole():
            return self._size

    def __repr__(self) -> str:
        return f"DraftHistory({len(self)} of at most {self.max_tokens} tokens, {len(self._texts)} texts)"

    def __deepcopy__(self, memo: dict) -> "DraftHistory":
        """With the texts; successors are learned anew."""
        return DraftHistory.from_bytes(self.to_bytes())

    # ------------------------------------------------------------------ content

    def add(self, token_ids: Sequence[int] | torch.Tensor, tenant: str = EVERYBODY) -> None:
        """
        Adds a text: a document that answers will quote, an output that is expected, an earlier answer.

        Args:
            token_ids (`list[int]`, or a tensor or array of them): Its tokens.
            tenant (`str`, *optional*): Whose it is.

        Raises:
            ValueError: these are no tokens, or this is no name.
        """
        if not isinstance(tenant, str):
            raise ValueError(f"A tenant is named by a string, got {tenant!r}.")
        try:
            given = token_ids if isinstance(token_ids, torch.Tensor) else torch.as_tensor(token_ids, device="cpu")
            tokens = to_host(given.reshape(-1)[-self.max_tokens :])
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"`token_ids` must be integers: {error}.") from error
        if not all(type(token) is int and 0 <= token <= LARGEST_TOKEN for token in tokens):
            raise ValueError(f"`token_ids` must be integers between 0 and {LARGEST_TOKEN}.")
        if tokens:
            with self._whole():
                self._add(tokens, tenant)

    def clear(self) -> None:
        """Forgets everything, the vocabulary too."""
        with self._whole():
            self._is_changing = True
            self.vocab_size = None
            self._texts = deque()  # from here on it counts
            self._rebuild()

    def forget(self, tenant: str) -> None:
        """Forgets everything of one tenant."""
        with self._whole():
            self._is_changing = True
            self._tables.pop(tenant, None)
            self._indexes.pop(tenant, None)
            self._texts = deque(text for text in self._texts if text[0] != tenant)
            self._count()

    def for_tenant(self, tenant: str) -> "TenantHistory":
        """What to pass as `draft_history=` so that a call sees the texts of `tenant` only, and adds to them."""
        if not isinstance(tenant, str) or not tenant:
            raise ValueError(f"A tenant is named by a string that is not empty, got {tenant!r}.")
        return TenantHistory(self, tenant)

    def texts(self) -> list[tuple[str, list[int]]]:
        """`(tenant, token_ids)` of every text, oldest first; the tenant of texts that have none is empty."""
        with self._whole():
            return [(name, tokens.tolist()) for name, tokens, _ in self._texts]

    def merge(self, *others: "DraftHistory") -> None:
        """Adds the texts of the others that are missing here, as the newest ones."""
        self._check_others(others)
        for tenant, tokens in [text for other in others for text in other.texts()]:
            self.add(tokens, tenant)

    def replace(self, others: "Sequence[DraftHistory]") -> None:
        """Holds the texts of the others instead of its own, those of the first as the oldest."""
        self._check_others(others)
        texts = [text for other in others for text in other.texts()]  # before the lock: two may replace each other
        new = DraftHistory(self.max_tokens)
        for tenant, tokens in texts:
            new.add(tokens, tenant)
        with self._whole():
            self._is_changing = True
            self._tables.clear()
            self._texts = new._texts
            self._rebuild()

    def _add(self, tokens: list[int], name: str) -> None:
        text = array("i", tokens)
        digest = hashlib.blake2b(text.tobytes(), digest_size=16).digest()
        if (name, digest) in self._known:
            return
        self._is_changing = True
        index = self._indexes.setdefault(name, SuffixIndex())
        index.extend(tokens)
        index.end_text()
        self._texts.append((name, text, digest))
        self._known.add((name, digest))
        self._size += len(text)
        while self._size > self.max_tokens:
            self._drop_oldest()
        self._is_changing = False

    def _drop_oldest(self) -> None:
        name, text, digest = self._texts.popleft()
        self._known.discard((name, digest))
        self._size -= len(text)
        index = self._indexes[name]
        index.drop(len(text) + 1)
        if not len(index):  # also what was learned from these texts
            del self._indexes[name]
            self._tables.pop(name, None)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Holds the lock; makes good what was left half done by Ctrl-C, or for want of memory."""
        with self._lock:
            if self._is_changing:
                self._rebuild()
            yield

    def _rebuild(self) -> None:
        """Makes everything from the texts, as many as there is room for."""
        size = sum(len(text) for _, text, _ in self._texts)
        while size > self.max_tokens:
            size -= len(self._texts.popleft()[1])
        indexes: dict[str, SuffixIndex] = {}
        for name, text, _ in self._texts:
            index = indexes.setdefault(name, SuffixIndex())
            index.extend(text)
            index.end_text()
        self._indexes = indexes
        for name in self._tables.keys() - indexes.keys():  # what was learned from texts that are gone
            del self._tables[name]
        self._count()

    def _count(self) -> None:
        self._known = {(name, digest) for name, _, digest in self._texts}
        self._size = sum(len(text) for _, text, _ in self._texts)
        self._is_changing = False

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike) -> None:
        """Writes one file in the safetensors format. The tables of successors are not saved."""
        write(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike, tokenizer: "PreTrainedTokenizerBase | None" = None) -> "DraftHistory":
        """
        Reads what [`~DraftHistory.save`] wrote.

        Raises:
            ValueError: the file is damaged, newer, none of ours, or of another tokenizer; the message names it.
        """
        return cls.from_bytes(Path(path).read_bytes(), str(path), tokenizer)

    def to_bytes(self) -> bytes:
        with self._whole():
            texts = self.texts()
            header = {
                "max_tokens": self.max_tokens,
                "vocab_size": self.vocab_size,
                "vocabulary": self._vocabulary,
                "tenants": [name for name, _ in texts],
            }
        tensors = {
            "token_ids": from_host([token for _, tokens in texts for token in tokens], dtype=torch.int32),
            "lengths": from_host([len(tokens) for _, tokens in texts], dtype=torch.long),
        }
        return pack(FORMAT, VERSION, header, tensors)

    @classmethod
    def from_bytes(
        cls, data: bytes, name: str = "these bytes", tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> "DraftHistory":
        header, tensors = unpack(data, FORMAT, VERSION, "draft history", name)
        try:
            history = cls(header["max_tokens"], tokenizer)
            vocabulary, vocab_size = header["vocabulary"], header["vocab_size"]
            texts = tensors["token_ids"].split(tensors["lengths"].tolist())
            for tenant, tokens in zip(header["tenants"], texts, strict=True):
                history.add(tokens, tenant)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} is damaged: {error}.") from error
        history._check_vocabulary(vocabulary, vocab_size, name)
        history._vocabulary = history._vocabulary or vocabulary
        return history

    def _check_others(self, others: "Sequence[DraftHistory]") -> None:
        for other in others:
            if not isinstance(other, DraftHistory):
                raise ValueError(f"Only texts of a whole DraftHistory can be taken, got a {type(other).__name__}.")
            self._check_vocabulary(other._vocabulary, other.vocab_size, "the other history")

    def _check_vocabulary(self, vocabulary: str | None, vocab_size: int | None, name: str) -> None:
        """Takes over a vocabulary's size, or refuses another one than this history's."""
        with self._whole():
            if None not in (vocabulary, self._vocabulary) and vocabulary != self._vocabulary:
                raise ValueError(f"{name} holds the tokens of another tokenizer.")
            if None not in (vocab_size, self.vocab_size) and vocab_size != self.vocab_size:
                raise ValueError(
                    f"{name} has a vocabulary of {vocab_size} tokens, this draft history one of {self.vocab_size}."
                )
            largest = max((int(index.tokens.max()) for index in self._indexes.values()), default=-1)
            if vocab_size is not None and vocab_size <= largest:
                raise ValueError(f"{name} has a vocabulary of {vocab_size} tokens, and this draft history others.")
            self.vocab_size = self.vocab_size or vocab_size

    # ------------------------------------------------------------------ for the decoding

    @contextmanager
    def _reading(self, name: str) -> Iterator[SuffixIndex]:
        with self._whole():
            yield self._indexes.get(name) or SuffixIndex()

    def _successors(self, name: str, k: int, device: torch.device) -> SuccessorTable:
        with self._lock:
            table = self._tables.pop(name, None)
            if table is None or (table.k, table.token_ids.device) != (k, device):
                table = SuccessorTable(k, device)
            self._tables[name] = table
            if len(self._tables) > MOST_TABLES:
                self._tables.popitem(last=False)
            return table


@dataclass(frozen=True)
class TenantHistory:
    """One tenant's part of a [`DraftHistory`]; made by [`DraftHistory.for_tenant`]."""

    history: DraftHistory
    tenant: str


class HistoryOfRows:
    """
    What a call sees of a draft history.

    Args:
        histories ([`DraftHistory`], [`TenantHistory`], or a list of them, one a prompt): As the user passed it.
        batch_size (`int`): Rows.
        each (`int`): Rows of a prompt, which stand together.
        vocab_size (`int`): Of the target.

    Raises:
        ValueError: it is something else, or holds another vocabulary.
    """

    def __init__(self, histories: Any, batch_size: int, each: int, vocab_size: int):
        given = list(histories) if isinstance(histories, list | tuple) else [histories] * (batch_size // each)
        for history in given:
            if not isinstance(history, DraftHistory | TenantHistory):
                raise ValueError(
                    "`draft_history` must be a DraftHistory, a part of one (`for_tenant`), or a list of them, one a "
                    f"prompt; got a {type(history).__name__}."
                )
        if len(given) * each != batch_size:
            raise ValueError(f"`draft_history` has {len(given)} entries for {batch_size // each} prompts.")
        parts = [TenantHistory(part, EVERYBODY) if isinstance(part, DraftHistory) else part for part in given]
        for history in {id(part.history): part.history for part in parts}.values():
            history._check_vocabulary(None, vocab_size, "the model")
        self._rows = [part for part in parts for _ in range(each)]

    def is_shared(self, row: int, other: int) -> bool:
        """Whether two rows have one tenant."""
        ours, theirs = self._rows[row], self._rows[other]
        return ours.history is theirs.history and ours.tenant == theirs.tenant

    def reading(self, row: int):
        """A context manager that gives the [`SuffixIndex`] of the row's tenant, which no one else changes meanwhile."""
        part = self._rows[row]
        return part.history._reading(part.tenant)

    def successors(self, row: int, k: int, device: torch.device) -> SuccessorTable:
        """The successors of the row's tenant."""
        part = self._rows[row]
        return part.history._successors(part.tenant, k, device)

    def add(self, texts: Sequence[list[int]]) -> None:
        """Adds the rows' texts."""
        for part, tokens in zip(self._rows, texts, strict=True):
            part.history.add(tokens, part.tenant)


def _fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    digest = hashlib.sha256()
    for token, place in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{place} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()
