"""A certificate for a store that serves over TLS, made for one job by the `openssl` program."""

from __future__ import annotations

import ipaddress
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dynapipe_ext.errors import StoreError

_LIMIT_S = 20.0
_DAYS = 3650  # a job ends sooner, and its key with it


@dataclass(frozen=True, slots=True)
class StoreCertificate:
    """Files of a certificate that trusts itself, and of its private key, which only this user can read."""

    cert: Path
    key: Path

    @property
    def pem(self) -> str:
        """The certificate's text: what clients trust."""
        return self.cert.read_text()


def make_certificate(folder: Path, host: str) -> StoreCertificate:
    """A certificate of `host` (an address or a name) in a private folder. Errors: StoreError where openssl cannot."""
    made = StoreCertificate(folder / "cert.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(made.key), "-out", str(made.cert), "-days", str(_DAYS), "-subj", "/CN=dynapipe store"]
    command += ["-addext", f"subjectAltName={'IP' if _is_address(host) else 'DNS'}:{host}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StoreError(f"no certificate for {host}: openssl cannot be run ({error}): install it") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise StoreError(f"no certificate for {host}: openssl failed ({lines[-1]})")
    made.key.chmod(0o600)
    return made


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
