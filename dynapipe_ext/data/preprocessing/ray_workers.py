"""Blocks through Ray Data: the cluster reads and encodes, this process writes, with the bytes of a local run.

    files -> read tasks, one a file -> blocks -> a pool of actors with the tokenizer -> results in order

Every node must see the input files under the same paths, and have this package.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from dynapipe_ext.data.preprocessing.encoders import Encoder, encoder_from_json
from dynapipe_ext.data.preprocessing.encoding import EncodedBlock, EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import BLOCK_BYTES, BlockStream, InputFile, file_blocks
from dynapipe_ext.data.preprocessing.workers import Result, guarded
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError, ExecutionError

# Of a CPU: an actor and a read task together take one, so that actors never keep all CPUs from the reading.
_ACTOR_CPUS, _READ_CPUS = 0.9, 0.1
# Threads of the tokenizers library would share the CPU that other actors have.
_ENVIRONMENT = {"env_vars": {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}}
_QUIET = {"enable_progress_bars": False, "print_on_execution_start": False, "target_max_block_size": BLOCK_BYTES}


class RayWorkers:
    """`num_workers` actors, by default as many as the cluster has CPUs, and as many tasks that read.

    `address` is that of a running cluster ("auto" for the one of this machine); None starts one here, of `local_cpus`
    where given, which ends with the context. Where Ray is connected already, that connection is used and stays.

    Errors: ConfigError without the package, or where the address does not answer; ExecutionError where the cluster
    fails.
    """

    def __init__(
        self,
        settings: EncodeSettings,
        encoder: Encoder,
        *,
        num_workers: int | None = None,
        address: str | None = None,
        local_cpus: int | None = None,
        object_store_bytes: int | None = None,
    ) -> None:
        try:
            import ray
            import ray.data
        except ImportError:
            raise ConfigError('--ray needs Ray Data: pip install "dynapipe-ext[ray]"') from None
        self._ray: Any = ray
        self._settings, self._tokenizer = settings, encoder.as_json()
        self._num_workers = num_workers
        self._address, self._local_cpus, self._object_store_bytes = address, local_cpus, object_store_bytes
        self._own = False

    def __enter__(self) -> Self:
        ray = self._ray
        if not ray.is_initialized():
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            if self._address is not None:
                options |= {"address": self._address}
            else:
                options |= {"include_dashboard": False, "num_cpus": self._local_cpus}
                options |= {"object_store_memory": self._object_store_bytes}
            try:
                ray.init(**options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = self._address or "this machine"
                raise ConfigError(f"Ray does not start at {where} ({error}): check --ray-address") from None
            self._own = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._own:
            self._ray.shutdown()
            self._own = False

    def run(self, blocks: BlockStream) -> Iterator[EncodedBlock]:
        ray = self._ray
        cpus = int(ray.cluster_resources().get("CPU", 0))
        num_workers = self._num_workers or cpus
        if not 1 <= num_workers <= cpus:
            raise ConfigError(f"{num_workers} workers need a CPU each but the Ray cluster has {cpus}: ask for fewer")
        given = {str(file.path.absolute()): str(file.path) for file, _ in blocks.left()}
        rows = [
            {"file": pickle.dumps((replace(file, path=file.path.absolute()), num_taken))}
            for file, num_taken in blocks.left()
        ]
        with _ordered_and_quiet(ray.data.DataContext.get_current()):
            results = (
                ray.data.from_items(rows, override_num_blocks=len(rows))
                .flat_map(
                    _Read(blocks),
                    num_cpus=_READ_CPUS,
                    runtime_env=_ENVIRONMENT,
                    compute=ray.data.TaskPoolStrategy(size=min(num_workers, len(rows))),
                )
                .map(
                    _Encode,
                    fn_constructor_args=(self._settings, self._tokenizer),
                    compute=ray.data.ActorPoolStrategy(size=num_workers),
                    num_cpus=_ACTOR_CPUS,
                    runtime_env=_ENVIRONMENT,
                )
            )
            try:
                for row in results.iter_rows():
                    result: Result = pickle.loads(row["result"])
                    if isinstance(result, Exception):
                        raise result
                    yield replace(result, file=given[result.file])
            except ray.exceptions.RayError as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
                raise ExecutionError(
                    f"the Ray cluster failed ({reason}): look at `ray status`, then start again, what is done is kept"
                ) from error


class _Read:
    """A file's blocks as rows; an error becomes the last of them, to be told in its turn."""

    def __init__(self, blocks: BlockStream) -> None:
        self._how = blocks.unit, blocks.columns, blocks.block_bytes

    def __call__(self, row: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
        file: InputFile
        file, num_taken = pickle.loads(row["file"])
        try:
            for place, block in enumerate(file_blocks(file, *self._how)):
                if place >= num_taken:
                    yield {"block": pickle.dumps(block)}
        except DynaPipeError as error:
            yield {"block": pickle.dumps(type(error)(str(error)))}
        except OSError as error:
            message = f"{file.path} cannot be read by a node of the cluster ({error.strerror}): put the files where all"
            yield {"block": pickle.dumps(DataError(f"{message} nodes see them"))}


class _Encode:
    def __init__(self, settings: EncodeSettings, tokenizer: str) -> None:
        self._settings, self._encoder = settings, encoder_from_json(tokenizer)

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        block = pickle.loads(row["block"])
        failed = isinstance(block, Exception)
        return {"result": pickle.dumps(block if failed else guarded(block, self._settings, self._encoder))}


@contextmanager
def _ordered_and_quiet(context: Any) -> Iterator[None]:
    """Ray Data keeps the order of rows, gives them on as they come, and prints nothing of its own."""
    before = {name: getattr(context, name) for name in _QUIET}
    order = context.execution_options.preserve_order
    logger = logging.getLogger("ray.data")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        for name, value in _QUIET.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = True
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = order
