"""Where the store listens, and the names of what planners and ranks of one job put there.

The password is kept apart from everything that is printed. A store has a namespace (one a run). Below it a `prefix` of
`Keys` keeps data loaders, and the passes of one loader, apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from dynapipe_ext.errors import ConfigError, StoreError

_FORMS = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS) or unix:///PATH/TO/SOCKET"
_DEFAULT_PORT = 6379
_MOST_URL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's URL without its password, and the password; `parse` makes one out of what a person wrote.

    `url` may hold an ACL user name and, for TLS, redis-py's options (`?ssl_ca_certs=…`); `repr` and `str` show no
    password. `ca_pem` is the text of certificates to trust, where no file holds them. `insecure` allows a network
    without TLS.

    >>> StoreAddress.parse("redis://alice:secret@10.0.0.7:6380/2")
    StoreAddress(url='redis://alice@10.0.0.7:6380/2')
    """

    url: str
    password: str = field(repr=False, default="")
    ca_pem: str = field(repr=False, default="")
    insecure: bool = field(repr=False, default=False)

    def __post_init__(self) -> None:
        parts = _split(self.url)
        if parts.password is not None or "password" in dict(parse_qsl(parts.query)):
            raise ConfigError(f"the password is inside the store address {_without_password(parts)!r}: pass it apart")

    @classmethod
    def parse(cls, text: str, password: str | None = None, *, insecure: bool = False) -> StoreAddress:
        """The address that `text` names. `password` is used where the URL has none of its own.

        Raises ConfigError for another form than the three known ones, and where there is no password: plans are taken
        from the store, so whoever can write to it steers the job.
        """
        parts = _split(text)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        url = _without_password(parts)
        secret = unquote(parts.password or "") or options.get("password") or password or ""
        if not secret:
            raise ConfigError(
                f"the store {url} has no password: set DYNAPIPE_STORE_PASSWORD (or write redis://:PASSWORD@HOST:PORT/0)"
            )
        return cls(url, secret, insecure=insecure)

    def to_json(self) -> dict[str, Any]:
        """All of it, the password too: for channels that nobody else reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StoreAddress:
        return cls(**fields)

    def __str__(self) -> str:
        return self.redacted()

    def redacted(self) -> str:
        """The URL for messages and reports: `***` stands for the password.

        >>> StoreAddress("redis://127.0.0.1:6379/0", "secret").redacted()
        'redis://:***@127.0.0.1:6379/0'
        """
        if not self.password:
            return self.url
        scheme, rest = self.url.split("://", 1)
        user = self.username or ""
        rest = rest.removeprefix(f"{quote(user, safe='')}@") if user else rest
        return f"{scheme}://{quote(user, safe='')}:***@{rest}"

    @property
    def files(self) -> tuple[str, ...]:
        """The files of certificates and keys that a TLS address names.

        >>> StoreAddress("rediss://10.0.0.7/0?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false").files
        ('/etc/ca.pem',)
        """
        options = dict(parse_qsl(_split(self.url).query))
        return tuple(options[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if name in options)

    @property
    def scheme(self) -> str:
        """`unix`, `redis` or `rediss`."""
        return _split(self.url).scheme

    @property
    def username(self) -> str | None:
        """The ACL user, or None for the default user."""
        name = _split(self.url).username
        return unquote(name) if name else None

    @property
    def host(self) -> str:
        """Host name or address; empty for a unix socket."""
        return _split(self.url).hostname or ""

    @property
    def port(self) -> int:
        """TCP port; 0 for a unix socket."""
        parts = _split(self.url)
        return 0 if parts.scheme == "unix" else parts.port or _DEFAULT_PORT

    @property
    def path(self) -> str:
        """Path of the unix socket; empty for TCP."""
        parts = _split(self.url)
        return unquote(parts.path) if parts.scheme == "unix" else ""


def _split(text: str) -> SplitResult:
    """The parts of a well-formed store URL. Messages never show the part that may hold a password."""
    scheme, separator, _ = text.partition("://")
    if not separator or scheme not in ("unix", "redis", "rediss"):
        shown = f"{scheme}://…" if separator else "given"
        raise ConfigError(f"the store address {shown} is not of a known form: write {_FORMS}")
    if "#" in text:
        raise ConfigError(f"the {scheme} store address holds '#': write it as %23 where it is part of the password")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # its text may quote a piece of a password
        raise ConfigError(f"the {scheme} store address has a port that is not in 1..65535: write {_FORMS}") from None
    if scheme == "unix" and not parts.path.startswith("/"):
        raise ConfigError(f"the unix store address names no absolute path: write {_FORMS}")
    if scheme != "unix" and not parts.hostname:
        raise ConfigError(f"the {scheme} store address names no host: write {_FORMS}")
    if port == 0:
        raise ConfigError(f"the {scheme} store address has port 0: write {_FORMS}")
    _database(parts)
    return parts


def _database(parts: SplitResult) -> int:
    text = dict(parse_qsl(parts.query)).get("db", "")
    if parts.scheme != "unix" and not text:
        text = parts.path.strip("/")
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"the store's database is {text!r} but must be a number such as 0: write {_FORMS}")
    return int(text or 0)


def _without_password(parts: SplitResult) -> str:
    location = parts.netloc.rpartition("@")[2]
    if parts.username:
        location = f"{parts.username}@{location}"
    options = urlencode([(k, v) for k, v in parse_qsl(parts.query, keep_blank_values=True) if k != "password"])
    return f"{parts.scheme}://{location}{parts.path}" + (f"?{options}" if options else "")


def url_in_file(file: Path, *, flag: str = "--store") -> str:
    """What a file of mode 600 holds, the address of a store. Errors: ConfigError, which never shows it."""
    try:
        with file.open() as opened:
            mode = os.fstat(opened.fileno()).st_mode
            url = opened.read(_MOST_URL_BYTES).strip()
    except (OSError, ValueError):
        raise ConfigError(f"{flag} is neither a URL (redis://, rediss://, unix://) nor a file with one") from None
    if mode & 0o077:
        raise ConfigError(f"{flag} {file} can be read by others, who would see the password: chmod 600 {file}")
    return url


def named_store(url_or_file: str | None) -> StoreAddress | None:
    """The store of a URL with its password, or of a file with such a URL; None of None. Errors: ConfigError."""
    if url_or_file is None:
        return None
    flag = "--dynapipe-store"
    return StoreAddress.parse(url_or_file if "://" in url_or_file else url_in_file(Path(url_or_file), flag=flag))


@dataclass(frozen=True, slots=True)
class Keys:
    """
    >>> Keys("3f2a/1").plan(epoch=0, step=7, dp_rank=1, pp_rank=3)
    '3f2a/1/plan/0/7/1/3'
    """

    prefix: str

    def plan(self, *, epoch: int, step: int, dp_rank: int, pp_rank: int) -> str:
        """The signed ExecutionPlan of one pipeline rank of one replica; its tensor parallel ranks share it."""
        return f"{self.prefix}/plan/{epoch}/{step}/{dp_rank}/{pp_rank}"

    def taken(self, *, epoch: int, step: int) -> str:
        """Put by global rank 0 when it takes its plan of the step: what lets planners go on."""
        return f"{self.prefix}/taken/{epoch}/{step}"

    def wanted(self, worker: int) -> str:
        """Put by a rank that waits: the key of a plan that this planner may have published to a store that lost it."""
        return f"{self.prefix}/wanted/{worker}"

    def failure(self, worker: int) -> str:
        """The signed sentence with which a planner process ended; see `publish_failure`."""
        return f"{self.prefix}/failure/{worker}"

    def heartbeat(self, worker: int) -> str:
        """A count that a living planner process raises; readers only look at whether it changes."""
        return f"{self.prefix}/heartbeat/{worker}"


class StoreTimeoutError(StoreError):
    """A key that was not put within the time limit of a `Store.get`."""


def overdue(key: str, timeout_s: float, where: str) -> StoreTimeoutError:
    """
    >>> str(overdue("plan/0/3/0/1", 2.0, "unix:///tmp/d/s"))
    "nobody put 'plan/0/3/0/1' into the store at unix:///tmp/d/s within 2.0 s: is its writer running?"
    """
    return StoreTimeoutError(
        f"nobody put {key!r} into the store at {where} within {timeout_s:.1f} s: is its writer running?"
    )
