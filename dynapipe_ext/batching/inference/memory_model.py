"""A learned memory model: the peak of a batch beside the first one's, from batches measured on the user's device.

Two parts, both growing in the number of texts and in the length of the longest, so their product does:

- phases: a peak is that of the highest of a few phases (the pass over the prompt, the steps of decoding, …), each a
  polynomial of rows R and length L with coefficients of at least 0: the maximum over phases of
  c . (1, L, L², R, R L, R L², P R, P R L, P R L²), where P is 1 if any text is padded, else 0;
- boosted trees under monotonic constraints, for what the phases leave: exp(sum of the trees' leaves), on features of
  the batch relative to the first one.

P is there because models drop a mask that masks nothing: a batch of equal texts can take a third of the memory of one
with a single token of padding (T5 with sdpa, 240 tokens).

It is read from JSON that holds numbers alone and is used with numpy alone.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynapipe_ext.batching.inference.batches import FirstBatch, IntArray
from dynapipe_ext.batching.inference.memory_records import MeasuredOn, MemoryRecord, field, parse
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.reproducible import FloatArray, exp, product

MODEL_FORMAT = "dynapipe-memory-model/1"
FEATURES = (
    "rows_ratio", "longest_ratio", "tokens_ratio", "padded_tokens_ratio", "any_padding",
    "first_rows", "first_longest", "first_any_padding",
)  # fmt: skip
MONOTONE = (1, 1, 1, 1, 1, 0, 0, 0)  # a mean length would fall as shorter texts join, so none is among the features
NUM_TERMS = 9

_EXACT_LENGTHS = 512  # longer ones are rounded up by at most the step below, for a table of bounded size
_LENGTH_STEP = 1.002
_MOST_FILE_BYTES = 1 << 27
_MOST_TREES, _MOST_NODES, _MOST_PHASES, _MOST_ERRORS = 5000, 4095, 16, 100_000
_CELLS_AT_ONCE = 1 << 20


def shapes_of(records: Sequence[MemoryRecord]) -> IntArray:
    """(batch, 4): rows, longest, tokens, and 1 where any text is padded."""
    rows = [(r.rows, r.longest, r.tokens, int(r.tokens < r.rows * r.longest)) for r in records]
    return np.array(rows, np.int64).reshape(-1, 4)


def terms(shapes_B4: IntArray) -> FloatArray:
    """(batch, term) of the phases' polynomials."""
    rows, length, _, padded = shapes_B4.T.astype(np.float64)
    by_rows = [rows, rows * length, rows * length**2]
    return np.stack([np.ones_like(rows), length, length**2, *by_rows, *(padded * x for x in by_rows)], axis=1)


def features(shapes_B4: IntArray, first_B4: IntArray) -> FloatArray:
    """(batch, feature) of batches, each beside its first one."""
    rows, longest, tokens, padded = shapes_B4.T.astype(np.float64)
    first_rows, first_longest, first_tokens, first_padded = first_B4.T.astype(np.float64)
    return np.stack(
        [
            rows / first_rows,
            longest / first_longest,
            tokens / first_tokens,
            rows * longest / (first_rows * first_longest),
            padded,
            first_rows,
            first_longest,
            first_padded,
        ],
        axis=1,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Boosted regression trees as arrays (tree, node), padded; a leaf is its own child, and its threshold infinite.

    The sum is `baseline` and then one leaf a tree, in order, as scikit-learn adds them: results have the same bits.
    """

    baseline: float
    feature: IntArray
    threshold: FloatArray
    left: IntArray
    right: IntArray
    value: FloatArray
    depth: int

    @classmethod
    def from_lists(cls, baseline: float, trees: Sequence[Any], where: str) -> Trees:
        """From objects with lists feature, threshold, left, right, value; a leaf has left and right -1.

        Errors: DataError for anything but trees whose children lie behind their parents.
        """
        if len(trees) > _MOST_TREES:
            raise DataError(
                f"{where} has {len(trees)} trees, more than the {_MOST_TREES} that are read: train it again"
            )
        columns: dict[str, list[list[Any]]] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
        depth = 0
        for number, tree in enumerate(trees):
            at = f"{where}, tree {number}"
            lists = {name: field(tree, name, list, at) for name in columns}
            _check_tree(lists, at)
            depth = max(depth, _link(lists))
            for name, values in lists.items():
                columns[name].append(values)
        width = max((len(values) for values in columns["left"]), default=1)

        def padded(name: str, dtype: Any) -> Any:
            table = np.zeros((len(trees), width), dtype)
            for row, values in zip(table, columns[name], strict=True):
                row[: len(values)] = values
            return table

        return cls(
            baseline,
            padded("feature", np.int64),
            padded("threshold", np.float64),
            padded("left", np.int64),
            padded("right", np.int64),
            padded("value", np.float64),
            depth,
        )

    def to_lists(self) -> list[dict[str, list[Any]]]:
        """What `from_lists` takes."""
        trees = []
        for tree in range(len(self.left)):
            used = 1 + int(max(self.left[tree].max(), self.right[tree].max()))
            leaf = self.left[tree, :used] == np.arange(used)
            trees.append(
                {
                    "feature": np.where(leaf, 0, self.feature[tree, :used]).tolist(),
                    "threshold": np.where(leaf, 0.0, self.threshold[tree, :used]).tolist(),
                    "left": np.where(leaf, -1, self.left[tree, :used]).tolist(),
                    "right": np.where(leaf, -1, self.right[tree, :used]).tolist(),
                    "value": np.where(leaf, self.value[tree, :used], 0.0).tolist(),
                }
            )
        return trees

    def predict(self, table_BF: FloatArray) -> FloatArray:
        """The sum of the leaves for each batch."""
        num_trees = len(self.left)
        if not num_trees:
            return np.full(len(table_BF), self.baseline)
        at_once = max(1, _CELLS_AT_ONCE // num_trees)
        parts = [self._predict(table_BF[i : i + at_once]) for i in range(0, len(table_BF), at_once)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _predict(self, table_BF: FloatArray) -> FloatArray:
        width = self.left.shape[1]
        base = (np.arange(len(self.left)) * width)[None, :]
        feature, threshold, left, right = (x.ravel() for x in (self.feature, self.threshold, self.left, self.right))
        rows = np.arange(len(table_BF))[:, None]
        place = np.broadcast_to(base, (len(table_BF), len(self.left)))
        for _ in range(self.depth):
            goes_left = table_BF[rows, feature[place]] <= threshold[place]
            place = base + np.where(goes_left, left[place], right[place])
        leaves = self.value.ravel()[place]
        sums: FloatArray = np.cumsum(np.concatenate([np.full((len(leaves), 1), self.baseline), leaves], axis=1), axis=1)
        return sums[:, -1]


def _check_tree(lists: dict[str, list[Any]], at: str) -> None:
    num_nodes = len(lists["left"])
    if not 1 <= num_nodes <= _MOST_NODES or any(len(values) != num_nodes for values in lists.values()):
        raise DataError(f"{at} has lists of unequal length, or not 1 to {_MOST_NODES} nodes: train it again")
    parents = [0] * num_nodes
    for node in range(num_nodes):
        left, right, feature = (lists[name][node] for name in ("left", "right", "feature"))
        numbers = lists["threshold"][node], lists["value"][node]
        if any(type(x) is not int for x in (left, right, feature)):
            raise DataError(f"{at}, node {node}: children and feature must be integers: train it again")
        if any(type(x) not in (int, float) or not math.isfinite(x) or abs(x) > 1e300 for x in numbers):
            raise DataError(f"{at}, node {node}: threshold and value must be finite numbers: train it again")
        if (left, right) == (-1, -1):
            continue
        if not (node < left < num_nodes and node < right < num_nodes and left != right):
            raise DataError(f"{at}, node {node} has children {left} and {right}: they must lie behind it")
        if not 0 <= feature < len(FEATURES):
            raise DataError(f"{at}, node {node} asks for feature {feature} of {len(FEATURES)}: train it again")
        parents[left] += 1
        parents[right] += 1
    if parents != [0] + [1] * (num_nodes - 1):
        raise DataError(f"{at} is no tree: a node has no parent, or two; train it again")


def _link(lists: dict[str, list[Any]]) -> int:
    """Make leaves their own children; returns the tree's depth."""
    depths = [0] * len(lists["left"])
    for node in range(len(depths)):
        if lists["left"][node] == -1:
            lists["left"][node] = lists["right"][node] = node
            continue
        for name in ("left", "right"):
            depths[lists[name][node]] = depths[node] + 1
    return max(depths)


@dataclass(frozen=True, slots=True, eq=False)
class LearnedMemory:
    """Peaks relative to the first batch's. Within the shapes that were measured only: `ceiling` bounds them.

    `errors`: actual over predicted peaks of held-out batches near the limit, ascending; `measured`: the batches.
    """

    measured_on: MeasuredOn
    measured: tuple[MemoryRecord, ...]
    phases: FloatArray  # (phase, term), bytes
    trees: Trees
    errors: tuple[float, ...]

    def ratio(self, shapes_B4: IntArray, first_B4: IntArray) -> FloatArray:
        """Predicted peaks of batches over those of their first ones, both as `shapes_of` gives them."""
        here, there = (product(terms(shapes), self.phases.T).max(axis=1) for shapes in (shapes_B4, first_B4))
        ratio: FloatArray = here / there * exp(self.trees.predict(features(shapes_B4, first_B4)))
        return ratio

    def margin(self, threshold: float) -> float:
        """Factor on predictions that peaks exceed with probability `threshold` at most, by the held-out errors.

        The split-conformal quantile. Warns, and takes the largest error seen, where `threshold` asks for more errors
        than there are.
        """
        rank = math.ceil((len(self.errors) + 1) * (1.0 - threshold))
        if rank > len(self.errors):
            warnings.warn(
                f"threshold {threshold} is less than {len(self.errors)} held-out peaks can vouch for: the largest error"
                " of them is allowed for; train on more records for a promise",
                UserWarning,
                stacklevel=2,
            )
        return max(1.0, self.errors[min(rank, len(self.errors)) - 1])

    def ceiling(self) -> tuple[int, int, int]:
        """The most texts, the longest text and the most padded tokens of a measured batch that fitted."""
        fitting = [record for record in self.measured if record.peak_bytes is not None]
        return (
            max(record.rows for record in fitting),
            max(record.longest for record in fitting),
            max(record.rows * record.longest for record in fitting),
        )

    def sizes(
        self, first: FirstBatch, *, peak_fraction: float, threshold: float, most_texts: float
    ) -> Callable[[int], int]:
        """As in `BatchMemory`: a function from the length of a batch's longest text to the most texts it may have.

        Their predicted peak, times the margin, is at most `peak_fraction` of the first batch's. A batch counts as
        padded, and with all texts as its longest. Errors: ConfigError where the first one is larger than any measured.
        """
        batch_size, longest = first.num_texts, first.longest
        most_rows, most_longest, most_tokens = self.ceiling()
        for name, value, bound, flag in (
            ("texts", batch_size, most_rows, "--max-rows"),
            ("tokens in its longest text", longest, most_longest, "--max-length"),
            ("padded tokens", batch_size * longest, most_tokens, "--max-tokens"),
        ):
            if value > bound:
                raise ConfigError(
                    f"the first batch has {value} {name}, but the memory model was measured up to {bound}: collect with"
                    f" {flag} {value} or more and train again, or lower batch_size or max_input_token_length"
                )
        limit = peak_fraction / self.margin(threshold)
        lengths = _length_grid(longest)
        first_14 = np.array([[batch_size, longest, first.tokens, int(first.tokens < batch_size * longest)]])
        low = np.full(len(lengths), batch_size, np.int64)
        high = np.maximum(low, np.minimum(min(most_rows, most_texts), most_tokens // lengths).astype(np.int64))
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_] + 1) // 2
            at = lengths[open_]
            shapes = np.stack([middle, at, middle * at, (at > 1) & (middle > 1)], axis=1)
            fits = self.ratio(shapes, first_14.repeat(len(at), axis=0)) <= limit
            low[open_] = np.where(fits, middle, low[open_])
            high[open_] = np.where(fits, high[open_], middle - 1)
        return lambda prompt_len: int(low[np.searchsorted(lengths, prompt_len)])

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes; floats keep their bits."""
        return {
            "format": MODEL_FORMAT,
            "measured_on": asdict(self.measured_on),
            "measured": [[r.rows, r.longest, r.tokens, r.peak_bytes, r.limit_bytes] for r in self.measured],
            "features": list(FEATURES),
            "phases": self.phases.tolist(),
            "baseline": self.trees.baseline,
            "trees": self.trees.to_lists(),
            "errors": list(self.errors),
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> LearnedMemory:
        """Errors: DataError naming the field; nothing in the data is executed or trusted."""
        file_format = data.get("format") if isinstance(data, dict) else None
        if file_format != MODEL_FORMAT:
            raise DataError(
                f"{where} has format {file_format!r:.60} but {MODEL_FORMAT!r} is needed: train a memory model"
            )
        if field(data, "features", list, where) != list(FEATURES):
            raise DataError(f"{where} has other features than {', '.join(FEATURES)}: train it again")
        names = ("rows", "longest", "tokens", "peak_bytes", "limit_bytes")
        measured = []
        for number, row in enumerate(field(data, "measured", list, where)):
            if not isinstance(row, list) or len(row) != len(names):
                raise DataError(f"{where}: measured[{number}] is no list of {len(names)}: train it again")
            record = dict(zip(names, row, strict=True))
            measured.append(MemoryRecord.from_json(record, f"{where}: measured[{number}]"))
        if all(record.peak_bytes is None for record in measured):
            raise DataError(f"{where} names no measured batch that fitted: train it again")
        phases = [
            _numbers(row, f"{where}: phases[{i}]", 0.0, 1e300)
            for i, row in enumerate(field(data, "phases", list, where))
        ]
        if not 1 <= len(phases) <= _MOST_PHASES or any(len(row) != NUM_TERMS or sum(row) <= 0.0 for row in phases):
            raise DataError(f"{where}: phases must be 1 to {_MOST_PHASES} rows of {NUM_TERMS} numbers: train it again")
        errors = _numbers(data.get("errors"), f"{where}: errors", 1e-9, 1e9)
        if not 1 <= len(errors) <= _MOST_ERRORS or list(errors) != sorted(errors):
            raise DataError(f"{where}: errors must be 1 to {_MOST_ERRORS} ascending numbers: train it again")
        baseline = field(data, "baseline", float, where)
        if not abs(baseline) <= 100.0:
            raise DataError(f"{where}: baseline is {baseline}, no logarithm of a ratio of peaks: train it again")
        return cls(
            MeasuredOn.from_json(data.get("measured_on"), where),
            tuple(measured),
            np.array(phases),
            Trees.from_lists(baseline, field(data, "trees", list, where), where),
            errors,
        )

    @classmethod
    def read(cls, path: str | Path) -> LearnedMemory:
        """A model that `dynapipe train-memory-model` wrote. Errors: DataError."""
        try:
            if os.stat(path).st_size > _MOST_FILE_BYTES:
                raise DataError(f"{path} is larger than a memory model can be: name another file")
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): train a memory model first") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8: name a file that train-memory-model wrote") from error
        return cls.from_json(parse(text, str(path)), str(path))


def _numbers(values: Any, at: str, least: float, most: float) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise DataError(f"{at} is no list of numbers: train it again")
    for value in values:
        if type(value) not in (int, float) or not least <= value <= most:
            raise DataError(f"{at} holds {value!r:.40}, not a number from {least:g} to {most:g}: train it again")
    return tuple(map(float, values))


def _length_grid(longest: int) -> IntArray:
    """All lengths up to 512, then geometric ones, up to `longest`, ascending."""
    grid = list(range(1, min(longest, _EXACT_LENGTHS) + 1))
    while grid[-1] < longest:
        grid.append(min(longest, max(grid[-1] + 1, int(grid[-1] * _LENGTH_STEP))))
    return np.array(grid, np.int64)
