"""What every Store promises, and what the Redis one promises about its server."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import redis

from dynapipe_ext.errors import ConfigError, DynaPipeError, StoreError
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.address import StoreAddress, StoreTimeoutError
from dynapipe_ext.executor.store.opening import MemoryStore, open_store
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.launch.store import RedisServer


@pytest.fixture(scope="module")
def address() -> Iterator[StoreAddress]:
    with RedisServer() as server:
        yield server.address


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, namespace: str) -> Iterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore()
    else:
        made = open_store(request.getfixturevalue("address"), namespace=namespace)
    yield made
    made.close()


@pytest.fixture
def redis_store(address: StoreAddress, namespace: str) -> Iterator[RedisStore]:
    with RedisStore(address, namespace=namespace) as made:
        yield made


def redis_at(address: StoreAddress) -> redis.Redis:
    return redis.Redis.from_url(address.url, password=address.password)


@pytest.fixture
def admin(address: StoreAddress) -> Iterator[redis.Redis]:
    with closing(redis_at(address)) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    """Poll, under the test's own time limit, for a state of another process that cannot be waited for."""
    while not condition():
        time.sleep(0.005)


def blocked(admin: redis.Redis) -> int:
    return int(admin.info("clients")["blocked_clients"])


def test_bytes_come_back_as_they_were_put(store: Store) -> None:
    value = bytes(range(256)) * 300
    store.put("a", value)
    store.put("empty", b"")
    assert store.get("a", 1.0) == value
    assert store.try_get("empty") == b""


def test_a_read_takes_nothing_away(store: Store) -> None:
    store.put("a", b"1")
    assert [store.get("a", 1.0) for _ in range(3)] == [b"1"] * 3
    assert store.try_get("a") == b"1"


def test_putting_again_replaces_and_putting_the_same_changes_nothing(store: Store) -> None:
    store.put("a", b"1")
    store.put("a", b"2")
    store.put("a", b"2")
    assert store.get("a", 1.0) == b"2"


def test_a_deleted_key_is_gone(store: Store) -> None:
    store.put("a", b"1")
    store.put("b", b"2")
    store.delete("a", "never put")
    store.delete()
    assert store.try_get("a") is None
    assert store.try_get("b") == b"2"


def test_an_overdue_wait_names_key_and_limit(store: Store) -> None:
    with pytest.raises(StoreTimeoutError, match=r"'plan/3'.*within 0\.1 s"):
        store.get("plan/3", 0.1)
    with pytest.raises(StoreTimeoutError):
        store.get("plan/3", 0.0)


def test_one_put_wakes_every_reader(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(store.get, "late", 30.0) for _ in range(8)]
        store.put("late", b"here")
        assert [reader.result(30) for reader in readers] == [b"here"] * 8


def test_readers_that_already_block_are_all_woken_by_one_put(redis_store: RedisStore, admin: redis.Redis) -> None:
    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(redis_store.get, "late", 30.0) for _ in range(8)]
        until(lambda: blocked(admin) == 8)
        redis_store.put("late", b"here")
        assert [reader.result(30) for reader in readers] == [b"here"] * 8


def test_a_reader_whose_connection_is_cut_still_gets_the_value(redis_store: RedisStore, admin: redis.Redis) -> None:
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(redis_store.get, "late", 30.0)
        for _ in range(3):
            until(lambda: blocked(admin) == 1)
            admin.client_kill_filter(_type="normal", skipme=True)
        redis_store.put("late", b"here")
        assert reader.result(30) == b"here"


def test_keys_expire_and_neither_reading_nor_waking_makes_them_eternal(
    redis_store: RedisStore, admin: redis.Redis, namespace: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(redis_store.get, "a", 30.0)
        until(lambda: blocked(admin) == 1)
        redis_store.put("a", b"1")
        reader.result(30)
    redis_store.get("a", 1.0)
    assert 0 < admin.pttl(f"dynapipe/{namespace}/a") <= 86_400_000


def test_a_store_says_where_another_process_opens_the_same_one(redis_store: RedisStore) -> None:
    redis_store.put("key", b"value")
    assert redis_store.address is not None
    with closing(open_store(redis_store.address, namespace=redis_store.namespace)) as other:
        assert other.try_get("key") == b"value"
    assert MemoryStore().address is None


def test_only_its_own_file_and_the_opener_know_a_kind_of_store(all_sources: Any) -> None:
    named = {source.path for source in all_sources if "RedisStore" in source.file.read_text()}
    assert {path for path in named if not path.startswith("tests")} == {
        "executor/store/opening.py",
        "executor/store/redis.py",
    }


def test_namespaces_do_not_see_each_other(address: StoreAddress, redis_store: RedisStore) -> None:
    redis_store.put("a", b"1")
    with RedisStore(address, namespace="other") as other:
        assert other.try_get("a") is None


def test_the_server_is_named_with_its_version(redis_store: RedisStore) -> None:
    info = redis_store.info()
    assert info["server"] in ("valkey", "redis")
    assert int(info["version"].split(".")[0]) >= 6


def test_a_lost_server_ends_a_long_wait_with_its_address() -> None:
    with RedisServer() as server, closing(redis_at(server.address)) as client:
        store = RedisStore(server.address, namespace="lost", reconnect_timeout_s=0.5)
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(store.get, "never", 600.0)
            until(lambda: blocked(client) == 1)
            server.close()
            with pytest.raises(StoreError, match=r"did not answer for 0\.5 s while waiting for 'never'") as caught:
                reader.result(50)
        assert server.address.path in str(caught.value)
        with pytest.raises(StoreError, match="putting 'a'"):
            store.put("a", b"1")
        store.close()


def test_a_server_that_is_started_again_is_used_again_by_who_waits_and_by_who_puts() -> None:
    with RedisServer() as server, closing(redis_at(server.address)) as client:
        store = open_store(server.address, namespace="again")
        store.put("a", b"1")
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(store.get, "late", 600.0)
            until(lambda: blocked(client) == 1)
            os.kill(server.pid, signal.SIGKILL)
            store.put("late", b"here")
            assert reader.result(50) == b"here"
        assert store.try_get("a") is None
        store.close()


def test_a_full_server_is_waited_for_and_then_named() -> None:
    """Nothing it holds is evicted, and what it holds can be waited for meanwhile."""
    with RedisServer() as server, closing(redis_at(server.address)) as client:
        store = RedisStore(server.address, namespace="full", reconnect_timeout_s=0.3)
        assert client.config_get("maxmemory*")["maxmemory-policy"] == "noeviction"
        assert int(client.config_get("maxmemory")["maxmemory"]) == 1 << 30
        store.put("a", b"1")
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreError, match=r"was full \(maxmemory\) for 0\.3 s while putting 'b'.*prefetch_steps"):
            store.put("b", b"2")
        assert store.get("a", 1.0) == b"1"
        with pytest.raises(StoreTimeoutError):
            store.get("b", 0.2)
        patient = RedisStore(server.address, namespace="full")
        with ThreadPoolExecutor(2) as pool:
            writer, reader = pool.submit(patient.put, "b", b"2"), pool.submit(patient.get, "b", 50.0)
            client.config_set("maxmemory", 0)
            writer.result(50)
            assert reader.result(50) == b"2"


def test_ctrl_c_ends_a_wait(redis_store: RedisStore, admin: redis.Redis) -> None:
    def interrupt() -> None:
        until(lambda: blocked(admin) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        redis_store.get("never", 600.0)
    thread.join()
    redis_store.put("after", b"1")
    assert redis_store.get("after", 1.0) == b"1"


def test_a_server_that_is_not_there_is_named_without_the_secret() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://me@127.0.0.1:{unused.getsockname()[1]}/0"
        with pytest.raises(StoreError, match=r"127\.0\.0\.1.*is the server running") as caught:
            RedisStore(StoreAddress(url, "hidden"), namespace="n", connect_timeout_s=0.3)
        with pytest.raises(
            StoreError, match=r"^nobody listens at .*127\.0\.0\.1.*refused.*start the server"
        ) as refused:
            RedisStore(StoreAddress(url, "hidden"), namespace="n")
    with pytest.raises(StoreError, match=r"^nobody listens at .*/nowhere/socket"):
        RedisStore(StoreAddress("unix:///nowhere/socket", "hidden"), namespace="n")
    assert "hidden" not in str(caught.value) + str(refused.value)


def test_a_wrong_or_missing_password_is_refused_at_once(address: StoreAddress) -> None:
    for password in ("wrong", ""):
        with pytest.raises(StoreError, match="refuses the password") as caught:
            RedisStore(StoreAddress(address.url, password), namespace="n", connect_timeout_s=600.0)
        assert address.password not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://10.255.255.1:6379", "rediss://node7:6380/0", "redis://user@node7"])
def test_a_network_server_without_a_password_is_refused_unasked(url: str) -> None:
    with pytest.raises(StoreError, match="without a password: set requirepass"):
        RedisStore(StoreAddress(url, ""), namespace="n")


@pytest.mark.parametrize("url", ["redis://10.255.255.1:6379", "redis://user@node7"])
def test_a_network_server_without_tls_is_refused_unasked_unless_that_is_said(url: str) -> None:
    with pytest.raises(StoreError, match=r"in the clear.*rediss://.*--insecure-store") as caught:
        RedisStore(StoreAddress(url, "hidden"), namespace="n")
    assert "hidden" not in str(caught.value)
    with pytest.raises(DynaPipeError, match=r"did not answer|cannot be used"):  # it was asked
        RedisStore(StoreAddress.parse(url, "hidden", insecure=True), namespace="n", connect_timeout_s=0.05)


def test_an_acl_user_without_the_needed_permissions_is_told_which(address: StoreAddress, admin: redis.Redis) -> None:
    admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@connection", "+lindex")
    url = address.url.replace("://", "://reader@", 1)
    with RedisStore(StoreAddress(url, "pw"), namespace="n") as store:
        assert store.info() == {"server": "redis", "version": "unknown"}
        with pytest.raises(StoreError, match=r"does not permit putting 'a'.*@write"):
            store.put("a", b"1")


def test_a_key_that_another_program_uses_is_a_store_error(
    redis_store: RedisStore, admin: redis.Redis, namespace: str
) -> None:
    admin.set(f"dynapipe/{namespace}/a", b"1")
    with pytest.raises(StoreError, match="no other program"):
        redis_store.get("a", 1.0)


def test_an_option_that_the_client_does_not_know_is_a_config_error(address: StoreAddress) -> None:
    with pytest.raises(ConfigError, match=r"store address.*cannot be used.*db_nr"):
        RedisStore(StoreAddress(f"{address.url}?db_nr=1", "pw"), namespace="n")


def test_an_empty_namespace_is_refused(address: StoreAddress) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        RedisStore(address, namespace="")
