"""Which core plans is known, shown, and the compiled one unless a pure build was asked for."""

import os

from dynapipe_ext.core import active_core, native
from dynapipe_ext.launch.doctor import all_checks


def test_the_native_core_is_active_unless_a_pure_build_was_asked_for() -> None:
    asked_pure = os.environ.get("DYNAPIPE_PURE", "").lower() in ("1", "true", "yes", "on")
    assert active_core() == ("python" if asked_pure else "native")
    assert (native is None) == asked_pure


def test_doctor_says_which_core_plans() -> None:
    (check,) = [check for check in all_checks() if check.name == "planning core"]
    assert check.value == active_core()
    assert check.ok == (active_core() == "native")
