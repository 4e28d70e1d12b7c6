"""The keys of a job, made of a secret that its ranks have before they meet, and of a salt that rank 0 sends to the
others.

launcher, file or the store's own password ─► secret ─┐
rank 0 ─► salt ─► the other ranks ────────────────────┴► keys, the same on every rank, none of which travels
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.processes.scratch import FEWEST_CHARACTERS, ScratchDirectory, is_guessable, read_secret


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Keys of one attempt of a job. The salt is no secret, but it is not in the store: somebody who knows the secret
    alone (everybody who shares a store knows its password) cannot make the keys. `is_shared`: all ranks have the secret
    already."""

    secret: str = field(repr=False)
    salt: str = field(repr=False)
    is_shared: bool = False

    @classmethod
    def begun(cls, secret: str) -> JobKeys:
        """The keys of a new attempt; made of a random secret where ranks share none."""
        return cls(secret or secrets.token_hex(32), secrets.token_hex(32), is_shared=bool(secret))

    @property
    def plan_key(self) -> bytes:
        return self._key("plans")

    @property
    def store_password(self) -> str:
        """Of a store that the job starts."""
        return self._key("store").hex()

    @property
    def namespace(self) -> str:
        """Of the keys in the store."""
        return f"run-{self._key('namespace').hex()[:16]}"

    def _key(self, purpose: str) -> bytes:
        return hmac.digest(self.secret.encode(), f"dynapipe {purpose} {self.salt}".encode(), "sha256")

    @contextmanager
    def for_peers(self, *, on_one_machine: bool) -> Iterator[dict[str, str]]:
        """What rank 0 sends to the other ranks, over a network that is not encrypted: the salt, and to ranks without
        the secret the path of a private file that holds it. To other machines it sends the secret itself: they have
        no other way to it."""
        if self.is_shared:
            yield {"salt": self.salt}
        elif on_one_machine:
            with ScratchDirectory() as scratch:
                file = scratch.path / "secret"
                file.touch(0o600)
                file.write_text(self.secret)
                yield {"salt": self.salt, "file": str(file)}
        else:
            yield {"salt": self.salt, "secret": self.secret}

    @classmethod
    def from_rank_0(cls, raw: Mapping[str, Any], secret: str) -> JobKeys:
        """The keys of rank 0, from what it sent (`for_peers`), on a rank that has `secret` (empty: it has none).

        Errors: ConfigError where one of both ranks has a secret and the other has none.
        """
        has_own = "file" in raw or "secret" in raw
        if has_own == bool(secret):
            raise ConfigError(
                f"{'this rank' if secret else 'rank 0'} was started with a secret of the job and"
                f" {'rank 0' if secret else 'this rank'} was not: give every node the same --secret-file"
            )
        if "file" in raw:
            secret = read_secret(Path(raw["file"]), None)
        return cls(raw.get("secret", secret), raw["salt"], is_shared=not has_own)


def tag_of_secret(secret: str) -> str:
    """What tells that two ranks have the same secret; empty for one that could be guessed by it, or none."""
    if is_guessable(secret):
        return ""
    return hmac.digest(secret.encode(), b"dynapipe comparison of secrets", "sha256").hex()


def refuse_guessable(secret: str, source: str) -> str:
    """The secret. Errors: ConfigError for one that is short."""
    if is_guessable(secret):
        raise ConfigError(
            f"{source} holds {len(secret)} characters but a job's secret must have at least {FEWEST_CHARACTERS}:"
            f" (umask 77; openssl rand -hex 32 > {source})"
        )
    return secret


UNSHARED_WARNING = (
    "WARNING: the store's password and the key of plans go to the other nodes unencrypted, over the network between"
    " ranks: put the same line into a file of mode 600 on every node and name it by --secret-file, or start all nodes"
    " by dynapipe launch --hosts"
)
