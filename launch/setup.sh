# Sourced by launch/quickstart.sh and tests/run.sh.
#
#   dynapipe_setup ROOT EXTRAS      (EXTRAS: "train" or "train,test")
#
# makes ROOT/.venv where it is absent and installs this package into it with those extras. Afterwards $venv_python is its
# interpreter. The second time it only compares a stamp. What it heeds:
#   DYNAPIPE_PYTHON   the interpreter to make the environment with (default: the first of python3.11, .12, .13, python3)
#   DYNAPIPE_TORCH    the torch requirement to install (default: torch==2.13.0), used only where torch is absent

_dynapipe_say() { printf 'dynapipe: %s\n' "$*" >&2; }

_dynapipe_fail() {
    _dynapipe_say "error: $*"
    exit 2
}

_dynapipe_is_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Run a command with its output in ROOT/build/setup.log; show the end of that if the command fails.
_dynapipe_quietly() {
    local log=$1
    shift
    if ! "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        _dynapipe_fail "this failed: $* (all of its output is in $log)"
    fi
}

_dynapipe_find_python() {
    local candidate
    if [ -n "${DYNAPIPE_PYTHON:-}" ]; then
        _dynapipe_is_python "$DYNAPIPE_PYTHON" || _dynapipe_fail "DYNAPIPE_PYTHON=$DYNAPIPE_PYTHON is no Python >= 3.11"
        printf '%s\n' "$DYNAPIPE_PYTHON"
        return
    fi
    # 3.11 first: the pinned torch and the tested megatron-core are for it. A name may be there and still not run (pyenv).
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 && _dynapipe_is_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    _dynapipe_fail "no Python >= 3.11 was found: install one, or name it with DYNAPIPE_PYTHON=/path/to/python"
}

_dynapipe_make_venv() {
    local root=$1 log=$2 base site=()
    if [ -e "$root/.venv" ] && ! _dynapipe_is_python "$venv_python"; then
        _dynapipe_fail "$root/.venv has no working Python >= 3.11: remove that folder and start again"
    fi
    if [ ! -e "$root/.venv" ]; then
        base=$(_dynapipe_find_python)
        # A torch that the machine came with (built for its GPU) is better than any that we could fetch.
        if "$base" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; then
            site=(--system-site-packages)
        fi
        _dynapipe_say "making .venv with $base"
        _dynapipe_quietly "$log" "$base" -m venv ${site[@]+"${site[@]}"} "$root/.venv"
    fi
    if ! "$venv_python" -m pip --version >/dev/null 2>&1; then # an earlier attempt was cut short
        _dynapipe_quietly "$log" "$venv_python" -m ensurepip --upgrade
    fi
}

# Whether the extras $2 are among those that the stamp file $1 lists.
_dynapipe_has_extras() {
    local extra
    [ -f "$1" ] || return 1
    for extra in ${2//,/ }; do
        grep -qx "$extra" "$1" || return 1
    done
}

dynapipe_setup() {
    local root=$1 extras=$2 log stamp hash packages
    venv_python=$root/.venv/bin/python
    unset VIRTUAL_ENV PYTHONHOME # another active environment is not this one
    # The path is in the hash: an environment that was copied along still points to where it came from.
    hash=$( { cat "$root/pyproject.toml" && printf '%s\n' "$root"; } | cksum | cut -d ' ' -f 1)
    stamp=$root/.venv/.dynapipe-$hash
    if _dynapipe_has_extras "$stamp" "$extras" && [ -x "$venv_python" ]; then
        return
    fi
    mkdir -p "$root/build"
    log=$root/build/setup.log
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$root/build/setup.lock"
        flock -n 9 || { _dynapipe_say "waiting for another set-up of this folder" && flock 9; }
    fi
    if ! _dynapipe_has_extras "$stamp" "$extras" || [ ! -x "$venv_python" ]; then # nobody finished it meanwhile
        : >"$log"
        _dynapipe_make_venv "$root" "$log"
        packages=(-e "$root[$extras]")
        "$venv_python" -c 'import torch' >/dev/null 2>&1 || packages+=("${DYNAPIPE_TORCH:-torch==2.13.0}")
        _dynapipe_say "installing dynapipe-ext[$extras] and what it needs (some minutes)"
        # Most of 20,000 files are never imported: those that are get compiled then.
        _dynapipe_quietly "$log" "$venv_python" -m pip install --no-compile "${packages[@]}"
        [ -f "$stamp" ] || rm -f "$root"/.venv/.dynapipe-*
        printf '%s\n' ${extras//,/ } >>"$stamp"
    fi
    if command -v flock >/dev/null 2>&1; then
        exec 9>&- # what runs next must not hold the lock
    fi
}
