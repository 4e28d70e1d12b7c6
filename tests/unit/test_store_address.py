"""A store's address is taken apart without ever showing its password."""

from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError, StoreError, StoreRefusedError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.launch.store import greet_store, store_address


def test_a_certificate_that_is_not_on_this_machine_is_named_before_anybody_connects(tmp_path: Path) -> None:
    url = f"rediss://h?ssl_ca_certs={tmp_path}/ca.pem"
    with pytest.raises(ConfigError, match=r"--store names .*/ca\.pem, which cannot be read here: put it on every"):
        store_address(url, "given")
    (tmp_path / "ca.pem").touch()
    assert store_address(url, "given").password == "given"


def test_a_store_that_is_away_is_refused_unless_it_has_served_the_job_before(tmp_path: Path) -> None:
    nobody = StoreAddress(f"unix://{tmp_path}/store.sock", "given")
    with pytest.raises(StoreRefusedError, match="nobody listens at"):
        greet_store(nobody)
    with pytest.raises(StoreError, match=r"did not answer for 0\.2 s") as caught:
        greet_store(nobody, 0.2)
    assert not isinstance(caught.value, StoreRefusedError)


@pytest.mark.parametrize(
    ("text", "url", "password"),
    [
        ("unix:///run/a%20b/s.sock", "unix:///run/a%20b/s.sock", "given"),
        ("redis://:inside@h:1/2", "redis://h:1/2", "inside"),
        ("redis://h", "redis://h", "given"),
        ("rediss://al%40ice:p%2Fw@h:6380/0", "rediss://al%40ice@h:6380/0", "p/w"),
        ("rediss://h?ssl_ca_certs=/ca.pem&password=q", "rediss://h?ssl_ca_certs=%2Fca.pem", "q"),
        ("redis://[::1]:7/1", "redis://[::1]:7/1", "given"),
    ],
)
def test_the_password_leaves_the_url(text: str, url: str, password: str) -> None:
    address = StoreAddress.parse(text, "given")
    assert (address.url, address.password) == (url, password)
    assert password not in repr(address)
    assert password not in str(address)
    assert "***" in address.redacted()


def test_parts_are_what_a_client_needs() -> None:
    unix = StoreAddress.parse("unix:///run/a%20b/s.sock?db=3", "x")
    assert (unix.scheme, unix.path, unix.host, unix.port, unix.username) == ("unix", "/run/a b/s.sock", "", 0, None)
    tcp = StoreAddress.parse("rediss://al%40ice:x@h:6380/4")
    assert (tcp.scheme, tcp.path, tcp.host, tcp.port, tcp.username) == ("rediss", "", "h", 6380, "al@ice")
    assert StoreAddress.parse("redis://h", "x").port == 6379


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("localhost:6379", "known form"),
        ("http://:hidden@h", "known form"),
        ("redis://:hidden@", "no host"),
        ("redis://:hid/hidden@h", "1..65535"),
        ("redis://:hidden#1@h:1", "%23"),
        ("redis://:hidden@h:99999", "1..65535"),
        ("redis://:hidden@h:0", "port 0"),
        ("redis://:hidden@h/first", "database"),
        ("unix://relative.sock", "absolute path"),
        ("redis://10.0.0.7:6379/0", "DYNAPIPE_STORE_PASSWORD"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_showing_a_password(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        StoreAddress.parse(text)
    assert "hidden" not in str(caught.value)


def test_an_address_cannot_be_built_with_its_password_in_the_url() -> None:
    with pytest.raises(ConfigError, match="pass it apart") as caught:
        StoreAddress("redis://:hidden@h/0")
    assert "hidden" not in str(caught.value)


def test_a_file_that_only_its_owner_reads_gives_user_and_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "store.url"
    file.write_text(f"rediss://alice:hidden@h:6380/0?ssl_ca_certs={file}\n")
    file.chmod(0o600)
    address = store_address(str(file))
    assert (address.username, address.password, address.host) == ("alice", "hidden", "h")
    assert capsys.readouterr().err == ""
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others.*chmod 600") as caught:
        store_address(str(file))
    assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"neither a URL .* nor a file"):
        store_address("localhost:6379")


def test_a_password_on_the_command_line_is_said_to_be_seen_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert store_address("redis://:hidden@127.0.0.1:1/0").password == "hidden"
    said = capsys.readouterr().err
    assert "visible in the process list" in said
    assert "hidden" not in said


def test_all_of_an_address_travels_between_processes() -> None:
    address = StoreAddress("rediss://al@h:1/0", "hidden", ca_pem="PEM", insecure=True)
    assert StoreAddress.from_json(address.to_json()) == address
