"""Manifests of checkpoints as other versions, or other people, would have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynapipe_ext.executor.checkpoints.folder import MANIFEST


def edit_manifest(folder: Path, **fields: Any) -> None:
    """Change some fields of a checkpoint's manifest, and leave out all checksums: whoever can change files can change
    these, too, and older versions had none."""
    raw = json.loads((folder / MANIFEST).read_text()) | fields
    raw = {name: value for name, value in raw.items() if name not in ("checksum", "checksums")}
    (folder / MANIFEST).write_text(json.dumps(raw))
