#!/usr/bin/env bash
# Every check of the project: sets up .venv, then ruff, mypy and pytest. The first argument may name one suite:
# `batching`, `checkpoint`, `estimate`, `loops` and `preprocessing` are the wings, `training` is all the rest. Other
# arguments are passed on to pytest.
#
#   bash tests/run.sh
#   bash tests/run.sh checkpoint
#   bash tests/run.sh tests/unit -k plan
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/setup.sh
source "$root/launch/setup.sh"

dynapipe_setup "$root" train,test,transformers,lora,inference,data,ray,deepspeed
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE # hundreds of interpreters start: none need compile again what one has compiled
cd "$root"

case ${1:-} in
    batching | checkpoint | estimate | loops | preprocessing) set -- "tests/$1" "${@:2}" ;;
    training) set -- tests/{contract,golden,gpu,integration,property,repo,unit} "${@:2}" ;;
esac

# Type checkers see the packages under the names they are installed as through a tree of links.
mkdir -p build/typing/dynapipe_ext
ln -sfr dynapipe_ext/* schedules executor launch tools build/typing/dynapipe_ext/
find build/typing -xtype l -delete

failed=()
check() {
    local name=$1
    shift
    echo "== $name" >&2
    "$@" || failed+=("$name")
}
# The status of a process in the background, once it has ended, and what it wrote.
ended() {
    local status=0
    wait "$1" || status=$?
    cat "$2"
    return "$status"
}

"$venv_python" -m mypy >build/mypy.log 2>&1 & # a minute of one core: all else begins beside it
trap 'kill %1 2>/dev/null || true' EXIT
check "ruff check" "$venv_python" -m ruff check .
check "ruff format" "$venv_python" -m ruff format --check .
# Four workers on 2 cores, since many tests wait; a file stays together, and tests/conftest.py says which ones come first.
check "pytest" "$venv_python" -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=25 "$@"
check "mypy" ended %1 build/mypy.log

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
